"""The form of a catalogue: a network by name, how to build it small, and inputs that it accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Entry:
    """One network of the zoo.

    Attributes:
        name: `package/architecture`.
        build: makes it, with random weights.
        inputs: makes inputs for it.
        needs: the packages that must be installed.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    needs: tuple[str, ...]

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in self.needs if find_spec(package) is None]


class Called(nn.Module):
    """A network called by keyword; returns the first tensor of what it returns, or the one of that name."""

    def __init__(self, network: nn.Module, names: Sequence[str], result: str | None = None) -> None:
        super().__init__()
        self.network, self.names, self.result = network, tuple(names), result

    def forward(self, *inputs: Tensor) -> Tensor:
        answer: Any = self.network(**dict(zip(self.names, inputs)))
        if self.result is not None:
            return getattr(answer, self.result)
        while not isinstance(answer, Tensor):
            answer = next(iter(answer.values())) if isinstance(answer, dict) else answer[0]
        return answer


def images(size: int = 32, channels: int = 3, batch: int = 2) -> Inputs:
    return lambda: (torch.rand(batch, channels, size, size, generator=torch.Generator().manual_seed(1)),)


def numbers(*shape: int) -> Inputs:
    return lambda: (torch.randn(shape, generator=torch.Generator().manual_seed(1)),)


def tokens(length: int = 12, symbols: int = 60, times: int = 1, batch: int = 2) -> Inputs:
    def make() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return tuple(torch.randint(4, symbols, (batch, length), generator=generator) for _ in range(times))

    return make
