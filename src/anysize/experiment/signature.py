"""What a network must know of the data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from anysize.config.tables import ExperimentConfig
from anysize.elastic.tracing.values import on_meta
from anysize.errors import ConfigError
from anysize.inputs import Inputs
from anysize.methods.size import Size
from anysize.tasks import MultiLabel, NextToken, Task
from anysize.wire import Json


@dataclass(frozen=True)
class Signature:
    """What a network must know about the data; in the checkpoint, so that a finished run works without the data.

    Attributes:
        input_shape: the shape of one sample.
        tokens: whether inputs are integers.
        target_shape: the shape of one sample's target.
        labels: whether targets are integers.
        outputs: how many numbers the network returns per sample or position.
        classes: how many classes there are, or None.
        class_names: their names, or None.
        mean: per channel, of inputs in [0, 1]; None for no normalisation.
        std: likewise.
        inputs: if a network has several inputs by name: of each its name, the shape of one sample, and whether it holds
            integers; `input_shape` is then the shape of the first.
    """

    input_shape: tuple[int, ...]
    tokens: bool
    target_shape: tuple[int, ...]
    labels: bool
    outputs: int
    classes: int | None
    class_names: tuple[str, ...] | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    inputs: tuple[tuple[str, tuple[int, ...], bool], ...] | None = None

    @property
    def names(self) -> list[str] | None:
        """The names of the inputs; None if there is one without a name."""
        return None if self.inputs is None else [name for name, _, _ in self.inputs]

    def example(self, count: int) -> Any:
        """An input batch on the meta device: a tensor, or `Inputs` if they have names.

        Networks read the integers among named inputs, such as masks of padding, so their values are known.
        """
        if self.inputs is None:
            kind = torch.int64 if self.tokens else torch.float32
            return torch.zeros(count, *self.input_shape, dtype=kind, device="meta")
        return Inputs({name: _blank(name, (count, *shape), tokens) for name, shape, tokens in self.inputs})

    def to_json(self) -> Json:
        """The signature as JSON; `from_json` is the inverse."""
        given = {name: value for name, value in asdict(self).items() if name != "inputs" or value is not None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_json(cls, values: Json) -> Signature:
        """The signature that `to_json` wrote."""
        made: dict[str, Any] = {key: _tupled(value) for key, value in values.items()}
        return cls(**made)


def _blank(name: str, shape: tuple[int, ...], tokens: bool) -> Tensor:
    """A named input on the meta device; a mask of padding hides the last position."""
    if not tokens:
        return torch.zeros(shape, device="meta")
    values = torch.ones(shape, dtype=torch.int64)
    if name.endswith("mask") and len(shape) > 1 and shape[-1] > 1:
        values[..., -1] = 0
    return on_meta(values)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Known:
    """What spares an experiment its data.

    Attributes:
        signature: what a network must know of the data.
        sizes: that the fleet trains, smallest first.
    """

    signature: Signature
    sizes: tuple[Size, ...]


def declared(config: ExperimentConfig, task: Task) -> Signature:
    """The signature of data that only the devices have, as the experiment declares it.

    Raises:
        ConfigError: with a line for each key that is missing.
    """
    model, about = config.model, config.task
    one_each = task.class_axis is None or isinstance(task, MultiLabel)
    tokens = isinstance(task, NextToken) if model.tokens is None else model.tokens
    problems = []
    if model.input is None:
        problems.append("model.input: missing; give the shape of one sample, such as [1, 28, 28]")
    if one_each and about.target is None:
        problems.append("task.target: missing; give the shape of one sample's target, such as [1]")
    if not one_each and about.classes is None:
        problems.append("task.classes: missing; say how many classes there are")
    if problems:
        listed = "\n  ".join(problems)
        raise ConfigError(f'data.name = "devices": the server sees no data, so the experiment must say:\n  {listed}')
    shape = tuple(model.input or ())
    target = about.target if about.target is not None else shape if isinstance(task, NextToken) else ()
    return Signature(
        input_shape=shape,
        tokens=tokens,
        target_shape=tuple(target),
        labels=not one_each,
        outputs=math.prod(target) if one_each else about.classes or 0,
        classes=None if one_each else about.classes,
        class_names=None,
        mean=None,
        std=None,
    )
