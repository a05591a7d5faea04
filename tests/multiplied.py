"""An independent count: every multiply-add of real tensors on a CPU, from the sizes of what goes in and comes out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


def multiplied(work: Callable[[], object]) -> int:
    """How many multiply-adds `work` does in matrix products and convolutions."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # switching a backend off warns of GPUs that are not there
        # In one kernel each, recurrent layers and attention would show nothing of what they multiply.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        seen = stack.enter_context(_Products())
        work()
    return seen.total


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _FUSED:
            raise AssertionError(f"{name} does not show what it multiplies")
        if name in _COUNTS:
            self.total += _COUNTS[name](out, *args)
        return out


def _product(out: Tensor, left: Tensor, right: Tensor) -> int:
    """Every entry of the result is a sum over the last axis of the left factor."""
    return out.numel() * left.shape[-1]


def _added_product(out: Tensor, added: Tensor, left: Tensor, right: Tensor, *rest: Any) -> int:
    return out.numel() * left.shape[-1]


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *options: Any) -> int:
    """Every output is a sum over its own part of the weight; transposed, every input goes into as many sums."""
    transposed = options[4]
    return (x if transposed else out).numel() * weight[0].numel()


def _convolution_backward(out: Any, gradient: Tensor, x: Tensor, weight: Tensor, bias: Any, *options: Any) -> int:
    """The derivative of each of those products by one factor is the other, and meets the gradient once."""
    transposed, wanted = options[3], options[-1]
    each = (x if transposed else gradient).numel() * weight[0].numel()
    return each * (bool(wanted[0]) + bool(wanted[1]))


_COUNTS: dict[str, Callable[..., int]] = {
    "mm": _product,
    "bmm": _product,
    "mv": _product,
    "addmm": _added_product,
    "baddbmm": _added_product,
    "addmv": _added_product,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
_FUSED = (
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_trilinear",
    "addbmm",
)
