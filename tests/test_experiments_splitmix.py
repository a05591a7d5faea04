"""Every command of the README for Split-Mix starts, and each of its files runs a little round."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import anysize as az
from anysize import config as configs
from anysize.config.tables import ExperimentConfig
from anysize.experiment.plan import plan
from anysize.runs.experiment import Experiment
from test_experiments import FOLDER, little_data, parsed

__all__ = ["little_data"]  # small sets under the names of the real ones, for every test here
README = FOLDER / "splitmix" / "README.md"
FILES = sorted(README.parent.glob("*.toml"))
COMMANDS = sorted(set(re.findall(r"`(anysize run [^`]*\.toml[^`]*)`", README.read_text())))
FEW_DIGITS = ["data.options.size=14", "data.options.per_domain=300", "data.options.test_per_domain=20"]


def short(config: ExperimentConfig) -> list[str]:
    return FEW_DIGITS if config.data.name == "digits-domains" else ["data.clients=20"]


def test_every_file_has_a_command_and_every_command_a_folder_of_its_own() -> None:
    assert {FOLDER.parent / command.split()[2] for command in COMMANDS} == set(FILES)
    assert len({command.partition("--out ")[2] for command in COMMANDS}) == len(COMMANDS) >= 30


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_starts(command: str) -> None:
    config, _ = parsed(command)
    if config.data.name == "domainnet":  # test_data.py has its folders of images, test_experiments_all.py its plan
        assert Experiment.from_config(config).method is not None
        return
    experiment = Experiment.from_config(configs.loads(configs.dumps(config), short(config)))
    if "norms" not in command or "local" in command:  # the start of the others is the same
        assert experiment.method.init(experiment.context) is not None
    assert experiment.method is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["robustness", "cifar10-classes"])
def test_a_file_plans_and_runs_one_round(name: str, tmp_path: Path) -> None:
    overrides = ["rounds=1", "training.local_epochs=1", "data.clients=10", "devices.capacities=[0.125,0.25]"]
    if "cifar" in name:
        overrides += ["data.fraction=0.5", "training.batch_size=16"]
    config = configs.load(README.parent / f"{name}.toml", [*overrides, 'engine.name="inprocess"'])
    few = short(config) if "digits" in config.data.name else []
    config = configs.loads(configs.dumps(config), [*few, "evaluation.attack_samples=20"])
    experiment = Experiment.from_config(config)
    small, large = (group["parameters"] for group in plan(experiment)["groups"])
    assert large == 2 * small
    run = az.run(experiment, out=tmp_path / "run")
    assert set(run.history[-1]["accuracy"]) == {size.label for size in run.sizes}
