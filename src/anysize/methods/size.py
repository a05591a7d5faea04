"""How large a network is, and how robust it can be."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """How large a network is, with one label: the key in every table and file.

    Attributes:
        width: the fraction of the channels.
        name: the label, if it is not the width.
        depth: how many blocks of every stage; None for all.
        mask: the fraction of the weights that a mask sets to zero.

    >>> Size(0.25).label
    '0.25'
    >>> Size(0.4, name="camera").label
    'camera'
    """

    width: float
    name: str = ""
    depth: int | None = None
    mask: float = 0.0
    robustness: float | None = None
    """Between 0 (accurate) and 1 (robust), if a method offers a choice; None for its default. Not in the label."""

    @property
    def label(self) -> str:
        """The capacity as given, or the device group's name."""
        return self.name or repr(float(self.width))

    @property
    def shape(self) -> str:
        """The width, and the depth and the mask if it has them: a name that no other size has.

        >>> Size(1.0, name="camera", depth=2, mask=0.5).shape
        '1.0 depth 2 mask 0.5'
        """
        parts = [repr(float(self.width)), *([f"depth {self.depth}"] if self.depth is not None else [])]
        return " ".join([*parts, *([f"mask {self.mask!r}"] if self.mask else [])])

    @property
    def order(self) -> tuple[float, float, float, str]:
        """A sort key, smallest first: by width, depth and how much the mask keeps."""
        return self.width, self.depth or math.inf, -self.mask, self.label

    def holds(self, other: Size) -> bool:
        """Whether a device of this size can run a network of the other.

        >>> Size(1.0, depth=2).holds(Size(0.5, depth=1)), Size(1.0, depth=2).holds(Size(1.0))
        (True, False)
        """
        return other.width <= self.width and (other.depth or math.inf) <= (self.depth or math.inf)


@dataclass(frozen=True)
class Levels:
    """The robustness that a customised network can have.

    Attributes:
        values: the levels, ascending; the first is the default.
        mixes: whether all levels between two values are allowed too, as mixtures of their tensors.

    >>> Levels((0.0, 1.0), mixes=True).allows(0.3), Levels((0.0, 1.0)).allows(0.3)
    (True, False)
    """

    values: tuple[float, ...]
    mixes: bool = False

    def allows(self, value: float) -> bool:
        """Whether a network can have this level."""
        return self.values[0] <= value <= self.values[-1] if self.mixes else value in self.values

    def __str__(self) -> str:
        if self.mixes:
            return f"{self.values[0]:g} to {self.values[-1]:g}"
        return ", ".join(f"{value:g}" for value in self.values)
