"""The callbacks that an experiment file names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anysize.callbacks.base import Callback
from anysize.callbacks.choosing import EarlyStopping, KeepBest
from anysize.callbacks.tracking import MLflow, TensorBoard, Tracker, WandB
from anysize.config.own_code import by_name
from anysize.errors import ConfigError, told

if TYPE_CHECKING:
    from anysize.config.tables import ExperimentConfig

_TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def of_config(config: ExperimentConfig) -> list[Callback]:
    """The callbacks of the tables [callbacks] and [track], built-in ones first."""
    asked, track = config.callbacks, config.track
    found: list[Callback] = []
    if asked.patience:
        found.append(EarlyStopping(asked.patience, asked.min_delta))
    if asked.keep_best:
        found.append(KeepBest())
    if track.name != "none":
        found.append(_tracker(track.name, track.options))
    return found + [_own(name) for name in asked.own]


def _tracker(name: str, options: Mapping[str, Any]) -> Callback:
    kind = _TRACKERS[name]
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(kind).parameters)
        raise ConfigError(f"track.options: {error}; '{name}' knows: {known}") from None
    return kind(**options)


def _own(name: str) -> Callback:
    """The user's callback: an object, or a class or function without parameters that makes one."""
    try:
        found = by_name(name, "callback", ())
        made = found() if callable(found) and not isinstance(found, Callback) else found
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"callbacks.own: '{name}': {told(error)}") from error
    if not isinstance(made, Callback):
        raise ConfigError(
            f"callbacks.own: '{name}' is a {type(made).__name__}; derive its class from anysize.callbacks.Callback"
        )
    return made
