"""The cost of a recurrent layer, counted from a few of its steps.

On the meta device torch runs a recurrent layer step by step, with a dozen operations each, which takes seconds for a
text of 80 characters. Every step after the first computes and holds the same amount. So while costs are counted, a
layer runs only its first steps, and its output is padded to the full length. Each step left out would have added the
difference between a run of three steps and a run of two. The result is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Count = Callable[[Callable[[], object]], tuple[int, int]]
"""Runs a function and returns (operations, bytes held for the backward pass)."""

_STEPS = 3
_LAYERS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


@dataclass(frozen=True)
class _Call:
    """A call of a recurrent layer whose last steps were left out."""

    function: Callable[..., Any]
    arguments: Sequence[Any]
    axis: int
    left_out: int
    learns: bool

    def run(self, steps: int) -> None:
        """A forward pass over this many steps, and a backward pass if the layer is trained."""
        sequence, *others = _alone(self.arguments)
        with torch.set_grad_enabled(self.learns):
            output = self.function(sequence.narrow(self.axis, 0, steps), *others)[0]
            if self.learns:
                output.sum().backward()


class FewSteps(TorchFunctionMode):
    """While it is active, recurrent layers on the meta device run only their first steps."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LAYERS or kwargs or not _of_whole_sequences(args):
            return func(*args, **(kwargs or {}))
        sequence, axis = args[0], 1 if args[-1] else 0
        left_out = sequence.shape[axis] - _STEPS
        if left_out <= 0:
            return func(*args)
        output, *states = func(sequence.narrow(axis, 0, _STEPS), *args[1:])
        # Copy now: the layer passes its own list of weights, and a composed network removes its weights again.
        self._calls.append(_Call(func, _alone(args), axis, left_out, output.requires_grad))
        first = output.movedim(axis, 0)  # steps come first in memory, whichever axis holds them
        padded = torch.cat([first, first.new_empty(left_out, *first.shape[1:])])
        return (padded.movedim(0, axis), *states)

    def left_out(self, count: Count) -> tuple[int, int]:
        """(operations, bytes held) of the steps left out, with backward passes; call it after the mode has ended."""
        operations = held = 0
        for call in self._calls:
            more, fewer = (count(lambda call=call, steps=steps: call.run(steps)) for steps in (_STEPS, _STEPS - 1))  # type: ignore[misc]
            operations += call.left_out * (more[0] - fewer[0])
            held += call.left_out * (more[1] - fewer[1])
        return operations, held


def _of_whole_sequences(arguments: Sequence[Any]) -> bool:
    """Whether a call's arguments are a sequence of full batches: a packed one moves the weights by one argument."""
    return arguments[0].is_meta and arguments[0].dim() == 3 and isinstance(arguments[2], list | tuple)


def _alone(argument: Any) -> Any:
    """The argument with its tensors detached from their graph."""
    if isinstance(argument, Tensor):
        return torch.empty_like(argument).requires_grad_(argument.requires_grad)
    if isinstance(argument, list | tuple):
        return [_alone(part) for part in argument]
    return argument
