"""The precision in which networks compute while clients train.

With `training.precision` of "bf16" or "fp16" a network's passes compute in half as many bits where that is safe, as
torch's autocast chooses. Weights, gradients, the optimizer, losses, regularisers and all that travels stay float32, and
so do tests and batch-norm statistics. With "float32" nothing is done at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anysize.config.tables import TrainingConfig

Pass = Callable[[nn.Module, Any], Tensor]
"""Runs a network on its inputs, and returns what it answers."""

_KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_SCALE = 2.0**12


def plain(module: nn.Module, x: Any) -> Tensor:
    """The answer as the network computes it.

    >>> plain(nn.Flatten(0), torch.ones(1, 2))
    tensor([1., 1.])
    """
    answer: Tensor = module(x)
    return answer


def passes(training: TrainingConfig, device: torch.device) -> Pass:
    """How a training step runs a network: in the chosen precision, with an answer that has single precision again.

    Every pass casts the weights anew: an attack runs the network without gradients for them, and a copy that it had
    made would have none.
    """
    if training.precision == "float32":
        return plain
    kind = _KINDS[training.precision]

    def lowered(module: nn.Module, x: Any) -> Tensor:
        with torch.autocast(device.type, kind), _SingleAttention() if device.type == "cpu" else nullcontext():
            answer = module(x)
        return single(answer)

    return lowered


class _SingleAttention(TorchFunctionMode):
    """Attention in single precision: on a processor torch's is four times as slow in half, mostly on the way back.

    Not inside torch's own layer of several heads, which a mode sees as one function.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given: Any = [single(x) if isinstance(x, Tensor) else x for x in args]
        with torch.autocast("cpu", enabled=False):
            return func(*given, **kwargs)


def single(tensor: Tensor) -> Tensor:
    """The tensor in its own precision, but at least single.

    >>> [single(torch.ones(1, dtype=kind)).dtype for kind in (torch.float16, torch.float64)]
    [torch.float32, torch.float64]
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor


class LossScale:
    """A factor on a loss, so that gradients too small for fp16 do not become zero on their way back.

    It is halved when a gradient was too large for fp16. It starts anew with every client's turn, since what a client
    computes depends on its message and its data alone.
    """

    def __init__(self) -> None:
        self.factor = _FIRST_SCALE

    @classmethod
    def of(cls, training: TrainingConfig) -> LossScale | None:
        """A new one where the training needs it: bf16 reaches as far down as float32."""
        return cls() if training.precision == "fp16" else None

    def removed(self, gradients: Iterable[Tensor]) -> bool:
        """Divide gradients by the factor in place; False, and half the factor, if one of them is not finite."""
        own = list(gradients)
        if not own:
            return True
        bad = torch.zeros(1, device=own[0].device)
        inverse = torch.full_like(bad, 1 / self.factor)
        torch._amp_foreach_non_finite_check_and_unscale_(own, bad, inverse)
        if bad.item():
            self.factor /= 2
        return not bad.item()
