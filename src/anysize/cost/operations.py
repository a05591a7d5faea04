"""Counting operations: torch's counter, with corrected and additional formulas.

torch counts two operations for a multiply-add, and so do the formulas here. A convolution multiplies every weight once
for every position: of the output, or of the input if it is transposed. Each of its two gradients does the same work as
the forward pass; torch ignores groups in the weight's gradient. It has no formula for products of matrix and vector,
for sums of products over a batch, and for `nn.Bilinear`. Costs are counted on the meta device only: there recurrent
layers decompose into matrix products, and `FusedAttention` keeps attention in one piece, as on a processor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
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


class FusedAttention(TorchFunctionMode):
    """While it is active, attention on the meta device holds for its backward pass what it holds on a processor.

    There it is one operation that keeps queries, keys, values and output; on the meta device torch takes it apart and
    keeps every score.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        fused = None
        if function is nn.functional.scaled_dot_product_attention:
            fused = _in_one_piece(*args, **given)
        return function(*args, **given) if fused is None else fused


def _in_one_piece(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """The attention's output; None where torch does not run it in one piece on a processor."""
    alike = query.shape[:2] == key.shape[:2] == value.shape[:2] and query.shape[-1] == key.shape[-1] == value.shape[-1]
    masked = attn_mask is not None and (attn_mask.requires_grad or attn_mask.dim() not in (2, 4))
    plain = query.is_meta and query.dim() == 4 and query.is_floating_point() and not dropout_p
    if not plain or not alike or masked or any(t.stride(-1) != 1 for t in (query, key, value)):
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


def _attention(query: Shape, key: Shape, value: Shape, *rest: Any, **more: Any) -> int:
    """The scores, and their mixture of the values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **more: Any) -> int:
    """The gradients of both products; the scores, which a processor computes once more, are not counted again."""
    return 2 * _attention(query, key, value)


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
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
