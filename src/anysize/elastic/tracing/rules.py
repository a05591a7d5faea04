"""One rule per operation: where the units of its inputs are in its outputs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from anysize.elastic.tracing.classes import Planes
from anysize.elastic.tracing.tracer import Call, Labels, Tracer, expanded, move_labels, put_all, rule, varying
from anysize.elastic.tracing.values import by_places


@rule(
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp",
    "tril", "triu", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "fill",
    "zero", "bernoulli", "uniform", "normal", "_to_copy", "detach", "alias", "lift_fresh", "clone", "random",
    "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "rrelu_with_noise", "log_sigmoid_forward",
    "native_dropout", "contiguous", "_conj", "flip", "roll", "view_as_real_copy",
)  # fmt: skip
def _keep(tracer: Tracer, call: Call) -> None:
    """The result has the operand's labels. Flips and rolls along a labelled axis move them."""
    source = call.tensors()[0]
    labels = tracer.labels(source)
    if call.name in ("flip", "roll"):
        move_labels(tracer, call)
        return
    neutral = labels.neutral or call.name.endswith("_like")
    for result in call.results():
        tracer.put(result, labels.planes, neutral=neutral, static=labels.static)


@rule("set")
def _replace(tracer: Tracer, call: Call) -> None:
    """A tensor whose memory is replaced, or freed as reversible networks do, keeps nothing."""
    tracer.put(call.results()[0], ())


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def _new(tracer: Tracer, call: Call) -> None:
    """A new tensor takes only its type from the old one; `SizeWatch` labels the axes whose sizes it knows."""
    tracer.put(call.results()[0], (), neutral=True)


@rule("view", "_unsafe_view", "_reshape_alias")
def _view(tracer: Tracer, call: Call) -> None:
    """A view by sizes; planes are reshaped, since they need not share the tensor's strides."""
    source, result = call.tensors()[0], call.results()[0]
    before, after = (tuple(int(size) for size in tensor.shape) for tensor in (source, result))
    planes = tuple(_reshaped(plane, before, after) for plane in tracer.labels(source).planes)
    put_all(tracer, call, [planes], like=source)


def _reshaped(plane: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor:
    """The plane of a view; only the axes between the first and the last that the view changes are expanded."""
    most = min(len(before), len(after))
    lead = next((axis for axis in range(most) if before[axis] != after[axis]), most)
    tail = next((axis for axis in range(most - lead) if before[-1 - axis] != after[-1 - axis]), most - lead)
    head, end = tuple(plane.shape[:lead]), tuple(plane.shape[len(before) - tail :])
    old, new = before[lead : len(before) - tail], after[lead : len(after) - tail]
    if all(size == 1 for size in plane.shape[lead : len(before) - tail]):
        return plane.reshape(*head, *(1 for _ in new), *end)
    return plane.expand(*head, *old, *end).reshape(*head, *new, *end)


@rule("as_strided")
def _as_strided(tracer: Tracer, call: Call) -> None:
    """Labels are laid out in memory as the tensor is, and read with the new strides."""
    source, result = call.tensors()[0], call.results()[0]
    first = result.storage_offset() - source.storage_offset()
    if first < 0 or first + _span(result) > _span(source):
        tracer.refuse(call)
    planes = []
    for plane in tracer.labels(source).planes:
        memory = torch.zeros(_span(source), dtype=torch.int64, device="cpu")
        memory.as_strided(tuple(source.shape), source.stride()).copy_(expanded(plane, source))
        planes.append(memory.as_strided(tuple(result.shape), result.stride(), first).clone())
    put_all(tracer, call, [tuple(planes)], like=source)


def _span(tensor: Tensor) -> int:
    """How many elements of memory lie between the first and the last of a tensor."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


@rule("unsqueeze", "transpose", "t", "permute", "swapaxes")
def _move_axes(tracer: Tracer, call: Call) -> None:
    """Axes move, also those of the tensor itself where the operation works in place; planes need not be expanded."""
    source = call.tensors()[0]
    move = getattr(torch, call.name)
    planes = tuple(move(plane, *call.args[1:], **call.kwargs) for plane in tracer.labels(source).planes)
    put_all(tracer, call, [planes], like=source)


@rule("constant_pad_nd")
def _pad(tracer: Tracer, call: Call) -> None:
    """Elements added along an axis of units belong to no unit; along others they belong to the units beside them."""
    source, pad = call.args[0], list(call.args[1])
    planes = []
    for plane in tracer.labels(source).planes:
        axes = varying(plane)
        own = [pad[place] if source.dim() - 1 - place // 2 in axes else 0 for place in range(len(pad))]
        planes.append(torch.constant_pad_nd(plane, own, 0))
    put_all(tracer, call, [tuple(planes)], like=source)


@rule("slice")
def _slice(tracer: Tracer, call: Call) -> None:
    """A slice of a stored tensor fixes that axis, unless its bounds follow a size.

    A later call may use what this one leaves out.
    """
    source = call.args[0]
    labels = tracer.labels(source)
    axis = int(call.bound()["dim"]) % source.dim()
    if labels.static and not tracer.cut_by_size and source.shape[axis] != call.results()[0].shape[axis]:
        for plane in labels.planes:
            tracer.fix_along(plane, axis)
    whole = [plane for plane in labels.planes if plane.shape[axis] == 1]
    cut = [call.func(plane, *call.args[1:], **call.kwargs) for plane in labels.planes if plane.shape[axis] > 1]
    put_all(tracer, call, [(*whole, *cut)], like=source)


@rule("select", "unbind", "diagonal")
def _select(tracer: Tracer, call: Call) -> None:
    """Taking one index of an axis fixes that axis, or unites a grid along it."""
    source, bound = call.args[0], call.bound()
    axes = [int(bound[name]) % source.dim() for name in ("dim", "dim1", "dim2") if name in bound]
    planes = tracer.labels(source).planes
    ended = [plane for plane in planes if len(axes) == 1 and varying(plane) == (axes[0],)]
    others = [plane for plane in planes if not any(plane is end for end in ended)]
    for axis in axes:
        others = [tracer.fix_along(plane, axis) for plane in others]
    move_labels(tracer, call, others)
    for result in call.results():
        for plane in ended:
            tracer.pin_if_read(result, plane)


@rule("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unsafe_chunk")
def _split(tracer: Tracer, call: Call) -> None:
    """Equal parts stay equal: they are united; unequal parts only carry their labels on.

    In a check of a narrowed network nothing is united: unequal parts may have become equal by chance.
    """
    source = call.args[0]
    axis = int(call.bound()["dim"]) % source.dim()
    sizes = [int(part.shape[axis]) for part in call.results()]
    equal = len(set(sizes)) == 1 and not tracer.classes.known
    for plane in tracer.labels(source).planes:
        if plane.shape[axis] > 1 and equal:
            first, *rest = torch.split(plane, sizes[0], axis)
            for part in rest:
                tracer.classes.unite(first, part)
    move_labels(tracer, call)


@rule("cat", "concatenate")
def _cat(tracer: Tracer, call: Call) -> None:
    """Labels are concatenated as the tensors are."""
    tensors = [tensor for tensor in call.args[0] if tuple(tensor.shape) != (0,)]
    axis = int(call.bound()["dim"]) % tensors[0].dim()
    parts = [(tuple(tensor.shape), tracer.labels(tensor)) for tensor in tensors]
    _put_joined(tracer, call, parts, axis)


@rule("stack")
def _stack(tracer: Tracer, call: Call) -> None:
    """Like a concatenation, along a new axis."""
    axis = int(call.bound()["dim"]) % call.results()[0].dim()
    parts = []
    for tensor in call.args[0]:
        labels = tracer.labels(tensor)
        shape = (*tensor.shape[:axis], 1, *tensor.shape[axis:])
        planes = tuple(plane.unsqueeze(axis) for plane in labels.planes)
        parts.append((shape, Labels(planes, labels.neutral, labels.static)))
    _put_joined(tracer, call, parts, axis)


def _put_joined(tracer: Tracer, call: Call, parts: Sequence[tuple[tuple[int, ...], Labels]], axis: int) -> None:
    slots: dict[tuple[int, ...], list[Tensor | None]] = {}
    for place, (_, labels) in enumerate(parts):
        for plane in map(tracer.compact, labels.planes):  # units may have been united since the part was made
            slot = tuple(other for other in varying(plane) if other != axis)
            row = slots.setdefault(slot, [None] * len(parts))
            mine = row[place]
            row[place] = plane if mine is None else mine
            tracer.couple(mine, plane if mine is not None else None, loose=True)
    for slot, row in slots.items():
        _fix_unmatched(tracer, slot, row, parts)
    planes = [_joined(slot, row, parts, axis) for slot, row in slots.items()]
    given = [labels for _, labels in parts]
    tracer.put(
        call.results()[0],
        planes,
        neutral=all(labels.neutral for labels in given),
        static=all(labels.static for labels in given),
    )


def _fix_unmatched(
    tracer: Tracer,
    slot: tuple[int, ...],
    row: list[Tensor | None],
    parts: Sequence[tuple[tuple[int, ...], Labels]],
) -> None:
    """Fix the axes of a slot that some part has at full size but without labels."""
    bare = [labels for plane, (_, labels) in zip(row, parts) if plane is None and not labels.neutral]
    for other in slot if bare else ():
        row[:] = [plane if plane is None else tracer.fix_along(plane, other) for plane in row]


def _joined(
    slot: tuple[int, ...],
    row: Sequence[Tensor | None],
    parts: Sequence[tuple[tuple[int, ...], Labels]],
    axis: int,
) -> Tensor:
    """The planes of one slot joined along `axis`; a part without a plane is "always there" (if neutral, it follows)."""
    example = next(plane for plane in row if plane is not None)
    pieces = []
    for plane, (shape, labels) in zip(row, parts):
        if plane is None:
            follows = labels.neutral and slot
            plane = example.narrow(axis, 0, 1) if follows else torch.zeros_like(example).narrow(axis, 0, 1)
        pieces.append(plane.expand(shape))
    return torch.cat(pieces, axis)


@rule("glu")
def _glu(tracer: Tracer, call: Call) -> None:
    """The two halves of an axis meet."""
    source = call.args[0]
    axis = int(call.bound()["dim"]) % source.dim()
    planes = []
    for plane in tracer.labels(source).planes:
        if plane.shape[axis] > 1:
            plane, second = plane.chunk(2, axis)
            tracer.classes.unite(plane, second)
        planes.append(plane)
    put_all(tracer, call, [tuple(planes)], like=source)


@rule("channel_shuffle", "native_channel_shuffle")
def _channel_shuffle(tracer: Tracer, call: Call) -> None:
    """Channels move between the module's groups; the number of groups does not change."""
    source, groups = call.args[0], int(call.args[1])
    planes = []
    for plane in tracer.labels(source).planes:
        if plane.shape[1] > 1:
            first, *rest = plane.chunk(groups, 1)
            for part in rest:
                tracer.classes.unite(first, part)
            shape = (plane.shape[0], groups, -1, *plane.shape[2:])
            plane = plane.reshape(shape).transpose(1, 2).flatten(1, 2)
        planes.append(plane)
    put_all(tracer, call, [tuple(planes)], like=source)


@rule(
    "mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "prod", "argmax",
    "argmin", "any", "all", "logsumexp", "norm", "linalg_vector_norm", "median", "nansum", "count_nonzero",
)  # fmt: skip
def _reduce(tracer: Tracer, call: Call) -> None:
    """A reduced axis may have any size; its labels end here. If the places of maxima are read, it stays whole."""
    source, bound = call.args[0], call.bound()
    given = bound.get("dim")
    listed = [given] if isinstance(given, int) else list(given or range(source.dim()))
    axes = sorted({int(axis) % source.dim() for axis in listed})
    labels = tracer.labels(source)
    planes = [_reduced(tracer, plane, axes) for plane in labels.planes]
    kept = [plane for plane in planes if plane is not None]
    for result in call.results():
        flat = result.dim() < source.dim()
        own = [plane.squeeze(axes) if flat else plane for plane in kept]
        tracer.put(result, own, neutral=labels.neutral, static=labels.static)
        if result.dtype == torch.int64 and source.dtype != torch.int64:  # places along the axis, not values of it
            for plane in (plane for plane in labels.planes if set(varying(plane)) & set(axes)):
                tracer.pin_if_read(result, plane)


def _reduced(tracer: Tracer, plane: Tensor, axes: Sequence[int]) -> Tensor | None:
    """The plane without variation along `axes`, or None if it varies along no other axis.

    A grid must give up some axes: if only the last is reduced (a norm within each head) `heads` decides which;
    otherwise the reduced axes are united and the others stay elastic.
    """
    inside = [axis for axis in varying(plane) if axis in axes]
    outside = [axis for axis in varying(plane) if axis not in axes]
    if inside and outside:
        normalising = list(axes) == [plane.dim() - 1] and tracer.heads == "within"
        plane = tracer.unite_along(plane, *(outside if normalising else inside))
    return None if any(plane.shape[axis] > 1 for axis in axes) else plane


@rule(
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "fractional_max_pool2d", "grid_sampler_2d",
)  # fmt: skip
def _spatial(tracer: Tracer, call: Call) -> None:
    """Channels pass through; spatial axes cannot carry units, since the operation mixes their elements."""
    source = call.args[0]
    found = re.search(r"(\d)d", call.name)
    first = source.dim() - int(found.group(1) if found else 2)
    planes = _clear_of(tracer, tracer.labels(source).planes, range(first, source.dim()))
    put_all(tracer, call, [planes] * len(call.results()), like=source)


def _clear_of(tracer: Tracer, planes: Iterable[Tensor], axes: Iterable[int]) -> Planes:
    """The planes after fixing `axes`, without those that vary only along them."""
    kept = []
    for plane in planes:
        for axis in axes:
            plane = tracer.fix_along(plane, axis)
        if not any(plane.shape[axis] > 1 for axis in axes):
            kept.append(plane)
    return tuple(kept)


@rule("max_unpool2d", "max_unpool3d")
def _unpool(tracer: Tracer, call: Call) -> None:
    """Values and their places meet; both carry channels only."""
    source, places = call.args[:2]
    axes = range(2, source.dim())
    operands = []
    for tensor in (source, places):
        labels = tracer.labels(tensor)
        operands.append((tuple(tensor.shape), Labels(_clear_of(tracer, labels.planes, axes), labels.neutral)))
    tracer.put(call.results()[0], tracer.combine(operands, source.dim()))


@rule("_fft_r2c", "_fft_c2r", "_fft_c2c")
def _fourier(tracer: Tracer, call: Call) -> None:
    """Transformed axes are fixed; the others keep their labels."""
    source = call.args[0]
    axes = [int(axis) % source.dim() for axis in call.args[1]]
    put_all(tracer, call, [_clear_of(tracer, tracer.labels(source).planes, axes)], like=source)


@rule("view_as_real")
def _as_real(tracer: Tracer, call: Call) -> None:
    """A last axis of two numbers is added."""
    source = call.args[0]
    put_all(tracer, call, [tuple(plane.unsqueeze(-1) for plane in tracer.labels(source).planes)], like=source)


@rule("view_as_complex")
def _as_complex(tracer: Tracer, call: Call) -> None:
    """The last axis, of two numbers, is one number."""
    source = call.args[0]
    planes = _clear_of(tracer, tracer.labels(source).planes, [source.dim() - 1])
    put_all(tracer, call, [tuple(plane.squeeze(-1) for plane in planes)], like=source)


@rule("nonzero", "_unique2", "unique_consecutive", "bincount", "masked_select")
def _counted(tracer: Tracer, call: Call) -> None:
    """The size of the result depends on values: every axis that is read stays as it is."""
    for tensor in call.tensors():
        for plane in tracer.labels(tensor).planes:
            tracer.classes.pin(plane)
    for result in call.results():
        tracer.put(result, ())


@rule("topk", "sort", "kthvalue")
def _ordered(tracer: Tracer, call: Call) -> None:
    """Sorting along an axis fixes it."""
    source = call.args[0]
    axis = int(call.bound()["dim"]) % source.dim()
    planes = _clear_of(tracer, tracer.labels(source).planes, [axis])
    for result in call.results():
        flat = result.dim() < source.dim()
        tracer.put(result, [plane.squeeze(axis) if flat else plane for plane in planes])


@rule("im2col")
def _im2col(tracer: Tracer, call: Call) -> None:
    """(B, C, H, W) -> (B, C k k, positions): each channel's label repeats over its window."""
    source, window = call.args[0], math.prod(call.args[1])
    planes = _clear_of(tracer, tracer.labels(source).planes, (2, 3))
    rows = tuple(
        plane.repeat_interleave(window, 1).squeeze(3) if plane.shape[1] > 1 else plane.squeeze(3) for plane in planes
    )
    put_all(tracer, call, [rows], like=source)


@rule("col2im")
def _col2im(tracer: Tracer, call: Call) -> None:
    """(B, C k k, positions) -> (B, C, H, W): the window of each channel is united."""
    source, window = call.args[0], math.prod(call.args[2])
    planes = []
    for plane in _clear_of(tracer, tracer.labels(source).planes, [source.dim() - 1]):
        if plane.shape[1] > 1:
            grid = plane.reshape(plane.shape[0], -1, window)
            tracer.classes.unite(grid, grid[..., :1])
            plane = grid[..., :1]
        planes.append(plane.unsqueeze(-1))
    put_all(tracer, call, [tuple(planes)], like=source)


@rule("embedding")
def _embedding(tracer: Tracer, call: Call) -> None:
    """Rows are symbols and stay; features are units."""
    table, symbols = call.args[0], call.args[1]
    features = _clear_of(tracer, tracer.labels(table).planes, [0])
    tracer.produce(features)
    rows = [plane.reshape((1,) * symbols.dim() + (-1,)) for plane in features]
    places = [plane.unsqueeze(-1) for plane in tracer.labels(symbols).planes]
    tracer.put(call.results()[0], [*rows, *places])


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(tracer: Tracer, call: Call) -> None:
    """Like an embedding, with one row for each bag."""
    features = _clear_of(tracer, tracer.labels(call.args[0]).planes, [0])
    tracer.produce(features)
    first, *rest = call.results()
    tracer.put(first, [plane.reshape(1, -1) for plane in features])
    for result in rest:
        tracer.put(result, ())


@rule("gather")
def _gather(tracer: Tracer, call: Call) -> None:
    """The axis in which places are chosen is fixed; along the others, places and values meet."""
    bound = call.bound()
    axis = int(bound["dim"]) % bound["self"].dim()
    tracer.put(call.results()[0], _met_beside(tracer, axis, (bound["self"], bound["index"])))


def _met_beside(tracer: Tracer, axis: int, tensors: Iterable[Tensor]) -> Planes:
    """The planes of tensors that meet element by element but along one axis, which is fixed as all unequal ones are."""
    tensors, operands = list(tensors), []
    sizes = [{int(size) for size in along} for along in zip(*(tensor.shape for tensor in tensors))]
    apart = [other for other, along in enumerate(sizes) if other == axis or len(along) > 1]
    for tensor in tensors:
        shape = [1 if other in apart else size for other, size in enumerate(tensor.shape)]
        labels = tracer.labels(tensor)
        planes = _clear_of(tracer, labels.planes, apart)
        operands.append((tuple(shape), Labels(planes, labels.neutral, loose=labels.loose)))
    return tracer.combine(operands, len(operands[0][0]))


@rule("index", "index_select")
def _index(tracer: Tracer, call: Call) -> None:
    """An indexed axis is fixed; the others keep their labels."""
    source, chosen = call.args[0], call.args[1:]
    if call.name == "index":
        indices = by_places(chosen[0])
        axes = [axis for axis, index in enumerate(indices) if index is not None]
        chosen = (indices,)
    else:
        axes = [int(chosen[0]) % source.dim()]
    for tensor in call.tensors()[1:]:
        for plane in tracer.labels(tensor).planes:
            tracer.classes.pin(plane)

    def first_place(leaf: Any) -> Any:
        plain = isinstance(leaf, Tensor) and leaf is not source
        return torch.zeros(tuple(leaf.shape), dtype=torch.int64, device="cpu") if plain else leaf

    arguments = tree_map(first_place, chosen)
    planes = _clear_of(tracer, tracer.labels(source).planes, axes)
    moved = tuple(call.func(expanded(plane, source).contiguous(), *arguments) for plane in planes)
    tracer.put(call.results()[0], moved)


@rule("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce")
def _written_along(tracer: Tracer, call: Call) -> None:
    """Values meet the target, except along the axis in which they choose their places."""
    bound = call.bound()
    target, axis = bound["self"], int(bound["dim"]) % bound["self"].dim()
    source = bound.get("source", bound.get("src"))
    for plane in tracer.labels(bound["index"]).planes:
        if call.name.startswith("index"):
            tracer.classes.pin(plane)
    given = (target, source, None if call.name.startswith("index") else bound["index"])
    tracer.put(call.results()[0], _met_beside(tracer, axis, (part for part in given if isinstance(part, Tensor))))


def _one_lane(plane: Tensor, axis: int) -> Tensor:
    """The labels of a plane along one axis, (size,)."""
    return plane.movedim(axis, 0).reshape(plane.shape[axis], -1)[:, 0]


@rule("index_put", "_index_put_impl")
def _index_put(tracer: Tracer, call: Call) -> None:
    """Values meet what the indices select; the indexed axes are fixed."""
    target, indices, values = call.args[0], by_places(call.args[1]), call.args[2]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    labels, given = tracer.labels(target), tracer.labels(values)
    planes = _clear_of(tracer, labels.planes, axes)
    if not given.planes and (values.dim() == 0 or values.numel() == 1):
        tracer.put(call.results()[0], planes)
        return
    behind = target.dim() - 1 - max(axes)  # axes after the indexed ones, which end both tensors
    shape = tuple(target.shape[target.dim() - behind :]) if behind else ()
    own = [plane.reshape(tuple(plane.shape[target.dim() - behind :])) for plane in planes if behind]
    tails = [
        _one_lane(plane, axis).reshape([-1 if a == axis else 1 for a in range(values.dim())][values.dim() - behind :])
        for plane in given.planes
        for axis in varying(plane)
        if axis >= values.dim() - behind
    ]
    for plane in given.planes:
        if not any(axis >= values.dim() - behind for axis in varying(plane)):
            tracer.classes.pin(plane)
    operands = [(shape, Labels(tuple(own), labels.neutral)), (shape, Labels(tuple(tails), given.neutral))]
    met = tracer.combine(operands, behind) if behind else ()
    lead = (1,) * (target.dim() - behind)
    others = [plane for plane in planes if max(varying(plane), default=0) < target.dim() - behind]
    tracer.put(call.results()[0], [*others, *(plane.reshape(lead + tuple(plane.shape)) for plane in met)])


@rule("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "vdot")
def _matmul(tracer: Tracer, call: Call) -> None:
    """Products: the contracted axes meet, the others pass through; an added bias meets the result."""
    *added, left, right = call.tensors()
    first, second = tracer.labels(left), tracer.labels(right)
    a, b = _matrix_shape(left, row=True), _matrix_shape(right, row=False)
    planes = tracer.contract(_as_matrices(first, a), _as_matrices(second, b), (max(a[0], b[0]), a[1], a[2], b[2]))
    result = call.results()[0]
    static = first.static and second.static
    # The result's own axes among (batch, row, column).
    spare = [axis for axis in range(3) if axis not in _result_axes(call.name)]
    own = Labels(tuple(plane.squeeze(spare) for plane in planes), static=static)
    if added:
        operands = [(tuple(result.shape), own), (tuple(added[0].shape), tracer.labels(added[0]))]
        planes = tracer.combine(operands, result.dim())
    tracer.put(result, planes if added else own.planes, static=static)


@rule("_grouped_mm")
def _grouped_product(tracer: Tracer, call: Call) -> None:
    """(rows, k) x (experts, k, columns): each row meets the matrix of its expert."""
    left, right = call.args[:2]
    first, second = tracer.labels(left), tracer.labels(right)
    planes = _clear_of(tracer, second.planes, [0])
    into, made = (tracer.lane([plane for plane in planes if plane.shape[axis] > 1], axis) for axis in (1, 2))
    tracer.couple(tracer.lane([plane for plane in first.planes if plane.shape[1] > 1], 1), into, loose=first.neutral)
    if made is not None and second.static:
        tracer.produce([made])
    rows = [plane for plane in first.planes if plane.shape[1] == 1]
    tracer.put(call.results()[0], [*rows, *([made.reshape(1, -1)] if made is not None else [])])


def _result_axes(name: str) -> tuple[int, ...]:
    if name in ("bmm", "baddbmm"):
        return (0, 1, 2)
    if name in ("mm", "addmm"):
        return (1, 2)
    return (1,) if name in ("mv", "addmv") else ()


def _matrix_shape(tensor: Tensor, *, row: bool) -> tuple[int, int, int]:
    sizes = tuple(int(size) for size in tensor.shape)
    if len(sizes) == 3:
        return sizes
    if len(sizes) == 2:
        return (1, *sizes)
    return (1, 1, sizes[0]) if row else (1, sizes[0], 1)


def _as_matrices(labels: Labels, shape: tuple[int, int, int]) -> Labels:
    def lift(plane: Tensor) -> Tensor:
        return plane.reshape(shape) if plane.dim() == 1 else plane.reshape((-1, *plane.shape[-2:]))

    return Labels(tuple(lift(plane) for plane in labels.planes), labels.neutral, labels.static)


@rule("convolution")
def _convolution(tracer: Tracer, call: Call) -> None:
    """Input channels meet the weight's input axis; its output axis labels the result.

    Axes of places pass through where the window has one place.
    """
    bound = call.bound()
    source, weight, bias = bound["input"], bound["weight"], bound["bias"]
    transposed, groups = bool(bound["transposed"]), int(bound["groups"])
    labels, stored = tracer.labels(source), tracer.labels(weight)
    planes = _clear_of(tracer, stored.planes, range(2, weight.dim()))
    rows, columns = (tracer.lane([p for p in planes if varying(p) == (axis,)], axis) for axis in (0, 1))
    untouched = _untouched_axes(bound)
    passing = [plane for plane in labels.planes if set(varying(plane)) <= untouched]
    given = tracer.lane([plane for plane in labels.planes if set(varying(plane)) - untouched], 1)
    if groups == 1:
        into, made = (rows, columns) if transposed else (columns, rows)
        tracer.couple(given, into, loose=labels.neutral)
        out = made
    else:
        lanes = GroupedLanes(given, rows, columns, groups, transposed, labels.neutral)
        out = _grouped_convolution(tracer, lanes, call.results()[0].shape[1] // groups)
    depthwise = groups > 1 and given is not None and groups == source.shape[1]
    if out is not None and stored.static and not depthwise:
        tracer.produce([out])
    if bias is not None:
        tracer.couple(out, tracer.lane(tracer.labels(bias).planes, 0))
    result = call.results()[0]
    shape = [-1 if axis == 1 else 1 for axis in range(result.dim())]
    tracer.put(result, [*passing, *([out.reshape(shape)] if out is not None else [])])


def _untouched_axes(bound: Mapping[str, Any]) -> set[int]:
    """The axes along which a convolution works place by place."""
    windows = zip(bound["weight"].shape[2:], bound["stride"], bound["padding"])
    return {axis for axis, (size, stride, padding) in enumerate(windows, 2) if (size, stride, padding) == (1, 1, 0)}


@dataclass(frozen=True)
class GroupedLanes:
    """What meets in a convolution with groups: the input's channels, and the weight's axes 0 and 1."""

    given: Tensor | None
    rows: Tensor | None
    columns: Tensor | None
    groups: int
    transposed: bool
    loose: bool


def _grouped_convolution(tracer: Tracer, lanes: GroupedLanes, made: int) -> Tensor | None:
    """The labels of the output channels; either whole convolution groups are elastic, or channels within every one.

    On a tie channels are: then both axes of the weight shrink, and not only the first.
    Where whole groups are, the `made` channels of each follow it, also if the forward builds the weight.
    """
    groups, given = lanes.groups, lanes.given
    grid = given.reshape(groups, -1) if given is not None else None
    by_group = grid is not None and varying(tracer.settle(grid, tie="inner")) == (0,)
    full = lanes.rows.reshape(groups, -1) if lanes.rows is not None else None
    shared = lanes.columns
    if full is not None:
        tracer.unite_along(full, 1 if by_group else 0)
    if by_group and grid is not None:
        tracer.couple(grid[:, :1], full, loose=True)
        tracer.couple(shared, None)
        labelled = lanes.rows is not None and not lanes.transposed
        return lanes.rows if labelled else grid[:, :1].expand(groups, made).flatten()
    into = full[0] if lanes.transposed and full is not None else shared
    tracer.couple(grid[0] if grid is not None else None, into, loose=lanes.loose)
    if not lanes.transposed:
        return lanes.rows
    return shared.repeat(groups) if shared is not None else None


@rule(
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
)
def _batch_norm(tracer: Tracer, call: Call) -> None:
    """Weight, bias and statistics meet the channels."""
    _normalise(tracer, call, 1)


@rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(tracer: Tracer, call: Call) -> None:
    """Weight and bias meet the last axes."""
    _normalise(tracer, call, call.args[0].dim() - len(call.args[1]))


@rule("native_group_norm")
def _group_norm(tracer: Tracer, call: Call) -> None:
    """Weight and bias meet the channels, which form a grid (groups, channels of a group)."""
    _normalise(tracer, call, 1)
    source, groups = call.args[0], int(call.bound()["group"])
    lane = tracer.lane(tracer.labels(source).planes, 1)
    if lane is not None and 1 < groups < source.shape[1]:
        tracer.grids.append(lane.reshape(groups, -1))


def _normalise(tracer: Tracer, call: Call, axis: int) -> None:
    source, *stored = call.tensors()
    after = source.dim() - axis
    operands = [(tuple(source.shape), tracer.labels(source))]
    for tensor in stored:
        trailing = (1,) * (after - tensor.dim())
        labels = tracer.labels(tensor)
        planes = tuple(plane.reshape(tuple(plane.shape) + trailing) for plane in labels.planes)
        operands.append((tuple(tensor.shape) + trailing, Labels(planes, labels.neutral, labels.static)))
    planes = tracer.combine(operands, source.dim())
    first, *rest = call.results()
    tracer.put(first, planes)
    for result in rest:
        tracer.put(result, ())
