"""Counting operations: torch's counter, with corrected and additional formulas.

torch counts two operations for a multiply-add, and so do the formulas here. A convolution multiplies every weight once
for every position: of the output, or of the input if it is transposed. Each of its two gradients does the same work as
the forward pass; torch ignores groups in the weight's gradient. It has no formula for products of matrix and vector,
for sums of products over a batch, and for `nn.Bilinear`. Costs are counted on the meta device only: there attention and
recurrent layers decompose into matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

Shape = Sequence[int]


def counter() -> FlopCounterMode:
    """Counts the operations of matrix products and convolutions while it is active.

    >>> with counter() as found:
    ...     out = torch.ones(2, 3, device="meta") @ torch.ones(3, 4, device="meta")
    >>> found.get_total_flops() // 2
    24
    """
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)


def _convolution_backward(
    gradient: Shape,
    x: Shape,
    weight: Shape,
    bias: Any,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    transposed: bool,
    output_padding: Shape,
    groups: int,
    wanted: tuple[bool, bool, bool],
    **rest: Any,
) -> int:
    """The operations of the requested gradients: of input and weight; that of the bias is only a sum."""
    samples, _, *positions = x if transposed else gradient
    return 2 * sum(wanted[:2]) * samples * math.prod(positions) * math.prod(weight)


def _matrix_vector(matrix: Shape, vector: Shape, **rest: Any) -> int:
    return 2 * math.prod(matrix)


def _add_matrix_vector(added: Shape, matrix: Shape, vector: Shape, **rest: Any) -> int:
    return 2 * math.prod(matrix)


def _add_batched_product(added: Shape, left: Shape, right: Shape, **rest: Any) -> int:
    return 2 * math.prod(left) * right[-1]


def _trilinear(
    first: Shape,
    second: Shape,
    third: Shape,
    missing_in_first: Collection[int],
    missing_in_second: Collection[int],
    missing_in_third: Collection[int],
    *rest: Any,
    **more: Any,
) -> int:
    """The work of `nn.Bilinear` and of each of its gradients: every weight once for every sample."""
    sizes: dict[int, int] = {}
    for shape, missing in ((first, missing_in_first), (second, missing_in_second), (third, missing_in_third)):
        axes = (axis for axis in range(len(shape) + len(missing)) if axis not in missing)
        sizes |= dict(zip(axes, shape))
    return 2 * math.prod(sizes.values())


_FORMULAS = {
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten.mv: _matrix_vector,
    torch.ops.aten.addmv: _add_matrix_vector,
    torch.ops.aten.addbmm: _add_batched_product,
    torch.ops.aten._trilinear: _trilinear,
}
