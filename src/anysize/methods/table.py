"""The look-up table of a method that searches before the first round: what could be trained, and how well it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from torch import Tensor

from anysize.methods.size import Size
from anysize.wire import Json


@dataclass(frozen=True)
class Entry:
    """One size that could be trained.

    Attributes:
        size: the size, without a name.
        accuracy: the accuracy on the held-out part of the proxy data, after training on the rest.
        masks: for each pruned weight which entries stay, as packed bits; empty if the network is dense.
        cost: the cost in each unit of a budget.
    """

    size: Size
    accuracy: float
    masks: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    cost: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> Json:
        """The entry as JSON, without the masks."""
        about = asdict(self.size)
        del about["name"]
        return about | {"accuracy": self.accuracy, "cost": dict(self.cost)}


@dataclass(frozen=True)
class Table:
    """The sizes that could be trained, and how well they did on the proxy data.

    Attributes:
        entries: the sizes.
        trained: the number of samples with which each was trained; 0 if nobody knows.
        judged: the number of held-out samples on which each was judged; 0 if nobody knows.
    """

    entries: tuple[Entry, ...]
    trained: int = 0
    judged: int = 0

    @cached_property
    def best_first(self) -> list[Entry]:
        """The entries by proxy accuracy, the highest first; among equals, the one with fewer bytes first."""
        return sorted(self.entries, key=lambda e: (-e.accuracy, e.cost.get("bytes", 0.0), e.size.order))

    def entry(self, size: Size) -> Entry | None:
        """The entry of a size, whatever its name."""
        return next((entry for entry in self.entries if entry.size == replace(size, name="")), None)
