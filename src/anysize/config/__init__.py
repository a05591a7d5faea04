"""The experiment file: TOML in, the complete TOML out. An unknown key is an error that names the nearest match."""

from anysize.config.compare import CompareConfig, CompareMethod
from anysize.config.devices import BudgetConfig, DevicesConfig, GroupConfig
from anysize.config.files import changes, dumps, from_dict, load, loads, parse
from anysize.config.tables import (
    CallbacksConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ExperimentConfig,
    MethodConfig,
    ModelConfig,
    TaskConfig,
    TrackConfig,
    TrainingConfig,
    TricksConfig,
)
from anysize.config.toml import differences

load_config = load  # its public name: az.load_config

__all__ = [
    "BudgetConfig",
    "CallbacksConfig",
    "CompareConfig",
    "CompareMethod",
    "DataConfig",
    "DevicesConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ExperimentConfig",
    "GroupConfig",
    "MethodConfig",
    "ModelConfig",
    "TaskConfig",
    "TrackConfig",
    "TrainingConfig",
    "TricksConfig",
    "changes",
    "differences",
    "dumps",
    "from_dict",
    "load",
    "load_config",
    "loads",
    "parse",
]
