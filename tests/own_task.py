"""A user's own task, named by "own_task:Absolute" in the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from anysize.tasks import Sums, Task


@dataclass(frozen=True)
class Absolute(Task):
    """Mean absolute error."""

    metric = "mae"
    higher_is_better = False

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().mean()

    def sums(self, output: Tensor, target: Tensor) -> Sums:
        return {"count": float(target.numel()), "absolute": float((output - target).abs().sum())}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        mae = sums["absolute"] / sums["count"]
        return {"mae": mae, "loss": mae}


number = 3
