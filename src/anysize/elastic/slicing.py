"""Cutting a module to a width: one small rule per layer type, and moving tensors between sizes.

`narrow` builds a new, ordinary `nn.Module` whose tensors are copies of the kept entries. Layers of `torch.nn`
store sizes beside their tensors; each type that does has one function here, registered by type, that reads
the sizes back from the narrowed tensors or from what the trace saw.

>>> from anysize.elastic.axes import trace
>>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
>>> small = narrow(net, trace(net, torch.zeros(2, 3)), 0.25)
>>> small[0]
Linear(in_features=3, out_features=2, bias=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anysize.elastic.axes import Axes, Index, Kept, Width
from anysize.elastic.skeleton import copied
from anysize.elastic.tracing.classes import Classes
from anysize.elastic.tracing.forward import assign, run, stored
from anysize.elastic.tracing.tracer import line_of
from anysize.errors import ModelError

# --- tensors between sizes ----------------------------------------------------------------------------------


def _is_range(rows: Tensor) -> bool:
    return bool((rows[1:] - rows[:-1] == 1).all())


def _window(tensor: Tensor, index: Index) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """A view that covers every contiguous run of indices, and what is left to gather: (axis, indices)."""
    left = []
    for axis, rows in enumerate(index):
        if rows is None:
            continue
        if len(rows) and _is_range(rows):
            tensor = tensor.narrow(axis, int(rows[0]), len(rows))
        else:
            left.append((axis, rows.to(tensor.device)))
    return tensor, left


def runs(size: int, rows: Tensor) -> tuple[int, int] | None:
    """(period, length) if of every `period` rows the first `length` are kept, as of every head or gate; else None.

    A prefix has one period, the whole axis.

    >>> runs(6, torch.tensor([0, 1])), runs(6, torch.tensor([0, 3])), runs(6, torch.tensor([0, 4]))
    ((6, 2), (3, 1), None)
    """
    count = rows.shape[0]
    if count and rows[-1].item() == count - 1:  # they are sorted, so the first is 0
        return size, count
    if not count or rows[0].item():
        return None
    length = int((rows[1:] - rows[:-1] != 1).nonzero()[0]) + 1
    period = int(rows[length])
    expected = torch.arange(size, device=rows.device).view(-1, period)[:, :length] if size % period == 0 else rows[:0]
    return (period, length) if expected.reshape(-1).equal(rows) else None


def divided(shape: Sequence[int], index: Index) -> tuple[list[int], list[int]] | None:
    """The shapes of a tensor and of its kept entries with an axis of periods before each axis that is kept in `runs`.

    In these shapes the kept entries are a prefix of every axis. None if an axis is kept in another way.

    >>> divided((6, 4), (torch.tensor([0, 3]), None)), divided((6, 4), (None, torch.tensor([1])))
    (([2, 3, 4], [2, 1, 4]), None)
    """
    whole: list[int] = []
    part: list[int] = []
    for axis, size in enumerate(shape):
        rows = index[axis] if axis < len(index) else None
        found = (size, size) if rows is None else runs(size, rows)
        if found is None:
            return None
        period, length = found
        if period < size:
            whole.append(size // period)
            part.append(size // period)
        whole.append(period)
        part.append(length)
    return whole, part


def take(tensor: Tensor, index: Index) -> Tensor:
    """A new contiguous tensor of the kept entries.

    >>> take(torch.arange(6).reshape(2, 3), (None, torch.tensor([0, 2])))
    tensor([[0, 2],
            [3, 5]])
    """
    if tensor.is_meta:
        sizes = [size if rows is None else len(rows) for size, rows in zip(tensor.shape, index)]
        return torch.empty(sizes, dtype=tensor.dtype, device="meta")
    view, left = _window(tensor.detach(), index)
    forms = divided(tensor.shape, index) if left and tensor.is_contiguous() else None
    if forms is not None:  # several times as fast as gathering
        sizes = [size if rows is None else len(rows) for size, rows in zip(tensor.shape, index)]
        part = tensor.detach().view(forms[0])[tuple(map(slice, forms[1]))]
        return part.clone(memory_format=torch.contiguous_format).view(sizes)
    for axis, rows in left:
        view = view.index_select(axis, rows)
    shares = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return view.clone(memory_format=torch.contiguous_format) if shares else view.contiguous()


def _grid(view: Tensor, left: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, ...]:
    """Index tensors for the product of the gathered indices and every other axis in full."""
    rows = dict(left)
    result = []
    for axis, size in enumerate(view.shape):
        own = rows.get(axis)
        own = torch.arange(size, device=view.device) if own is None else own
        result.append(own.reshape([-1 if other == axis else 1 for other in range(view.dim())]))
    return tuple(result)


def _check_fit(target: Tensor, index: Index, source: Tensor) -> None:
    wanted = tuple(size if rows is None else len(rows) for size, rows in zip(target.shape, index))
    if tuple(source.shape) != wanted:
        raise ModelError(
            f"a tensor of shape {tuple(source.shape)} does not fit the {wanted} entries kept of shape "
            f"{tuple(target.shape)}"
        )


@torch.no_grad()
def scatter_(target: Tensor, index: Index, source: Tensor) -> None:
    """Write `source` into the kept entries of `target`, in place.

    >>> full = torch.zeros(3)
    >>> scatter_(full, (torch.tensor([0, 2]),), torch.ones(2))
    >>> full
    tensor([1., 0., 1.])
    """
    _check_fit(target, index, source)
    view, left = _window(target, index)
    if not left:
        view.copy_(source)
    elif len(left) == 1:
        view.index_copy_(left[0][0], left[0][1], source.to(view))
    else:
        view.index_put_(_grid(view, left), source.to(view))


# --- layers that store sizes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """What a layer rule may ask: where the layer is, and what stays of it."""

    path: str
    axes: Axes
    kept: Kept

    def stays(self, name: str, axis: int) -> Tensor | None:
        """Whether each element on an axis of the layer's full tensor stays; None if there is no such tensor."""
        full = f"{self.path}.{name}" if self.path else name
        atoms = self.axes.found.atoms.get(full)
        if atoms is None or atoms[axis] is None:
            return None
        return self.axes.alive(self.kept)[atoms[axis]]

    def sizes_in(self) -> list[Tensor]:
        """For each axis of the layer's input, which positions stay; empty if it never ran."""
        return [self.axes.survivors(e, self.kept) for e in self.axes.found.inputs.get(self.path, ())]

    def sizes_out(self) -> list[Tensor]:
        """For each axis of the layer's output, which positions stay; empty if it never ran."""
        return [self.axes.survivors(e, self.kept) for e in self.axes.found.outputs.get(self.path, ())]


LayerRule = Callable[[Any, Cut], None]
LAYERS: dict[type[nn.Module], LayerRule] = {}
R = TypeVar("R", bound=LayerRule)


def layer(*kinds: type[nn.Module]) -> Callable[[R], R]:
    """Register the function that sets the stored sizes of a layer type after its tensors were cut."""

    def register(function: R) -> R:
        LAYERS.update(dict.fromkeys(kinds, function))
        return function

    return register


@layer(nn.Linear)
def _linear(module: nn.Linear, cut: Cut) -> None:
    module.out_features, module.in_features = module.weight.shape


@layer(nn.Bilinear)
def _bilinear(module: nn.Bilinear, cut: Cut) -> None:
    module.out_features, module.in1_features, module.in2_features = module.weight.shape


@layer(nn.modules.conv._ConvNd)
def _convolution(module: nn.modules.conv._ConvNd, cut: Cut) -> None:
    stays = cut.stays("weight", 0)
    if stays is not None and module.groups > 1:
        module.groups = int(stays.reshape(module.groups, -1).any(1).sum())
    first, second = module.weight.shape[:2]
    if module.transposed:
        module.in_channels, module.out_channels = first, second * module.groups
    else:
        module.out_channels, module.in_channels = first, second * module.groups


@layer(nn.modules.batchnorm._NormBase)
def _features(module: nn.modules.batchnorm._NormBase, cut: Cut) -> None:
    own = module.weight if module.weight is not None else module.running_mean
    seen = cut.sizes_in()
    if own is not None:
        module.num_features = len(own)
    elif len(seen) > 1:
        module.num_features = int(seen[1].sum())


@layer(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(module: nn.LayerNorm | nn.RMSNorm, cut: Cut) -> None:
    seen = cut.sizes_in()
    if module.weight is not None:  # a subclass may move axes before it normalises
        module.normalized_shape = tuple(module.weight.shape)
    elif seen and type(module) in (nn.LayerNorm, nn.RMSNorm):
        sizes = tuple(int(stays.sum()) for stays in seen)
        module.normalized_shape = sizes[-len(module.normalized_shape) :]


@layer(nn.GroupNorm)
def _group_norm(module: nn.GroupNorm, cut: Cut) -> None:
    seen = cut.sizes_in()
    if seen:
        module.num_groups = int(seen[1].reshape(module.num_groups, -1).any(1).sum())
        module.num_channels = int(seen[1].sum())


@layer(nn.Embedding, nn.EmbeddingBag)
def _embedding(module: nn.Embedding | nn.EmbeddingBag, cut: Cut) -> None:
    module.num_embeddings, module.embedding_dim = module.weight.shape


@layer(nn.PReLU)
def _prelu(module: nn.PReLU, cut: Cut) -> None:
    module.num_parameters = len(module.weight)


@layer(nn.Unflatten)
def _unflatten(module: nn.Unflatten, cut: Cut) -> None:
    seen = cut.sizes_out()
    if seen and isinstance(module.dim, int):
        start = module.dim % (len(seen) - len(module.unflattened_size) + 1)
        parts = seen[start : start + len(module.unflattened_size)]
        module.unflattened_size = tuple(int(stays.sum()) for stays in parts)


@layer(nn.RNNBase)
def _recurrent(module: nn.RNNBase, cut: Cut) -> None:
    read, fed_back = module.get_parameter("weight_ih_l0"), module.get_parameter("weight_hh_l0")
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    module.hidden_size, module.input_size = len(read) // gates, read.shape[1]
    if module.proj_size:
        module.proj_size = fed_back.shape[1]
    if module.proj_size >= module.hidden_size:
        raise ModelError(
            f"'{cut.path}' would have {module.hidden_size} hidden and {module.proj_size} projected units, "
            "and PyTorch needs fewer projected than hidden ones: choose a larger width, or one width per group"
        )


@layer(nn.RNNCellBase)
def _cell(module: nn.RNNCellBase, cut: Cut) -> None:
    module.input_size = module.weight_ih.shape[1]
    module.hidden_size = module.weight_hh.shape[1]


@layer(nn.MultiheadAttention)
def _attention(module: nn.MultiheadAttention, cut: Cut) -> None:
    stays = cut.stays("out_proj.weight", 0)
    if stays is not None:
        module.num_heads = int(stays.reshape(module.num_heads, -1).any(1).sum())
    module.embed_dim = module.out_proj.weight.shape[0]
    module.head_dim = module.embed_dim // module.num_heads
    same = module._qkv_same_embed_dim
    module.kdim = module.embed_dim if same else module.k_proj_weight.shape[1]
    module.vdim = module.embed_dim if same else module.v_proj_weight.shape[1]


@layer(nn.Transformer)
def _transformer(module: nn.Transformer, cut: Cut) -> None:
    for attention in (part for part in module.modules() if isinstance(part, nn.MultiheadAttention)):
        module.d_model, module.nhead = attention.embed_dim, attention.num_heads


# --- narrowing ----------------------------------------------------------------------------------------------


class _PlainCopies(TorchFunctionMode):
    """While a module is copied, tensors computed from others (which refuse a deep copy) become values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def narrow(module: nn.Module, axes: Axes, width: Width | Kept, *, verify: bool = True) -> nn.Module:
    """A new module cut to a width, really smaller, that runs without this package.

    Its tensors are copies of the kept entries (meta tensors stay meta); shared tensors stay shared. When a width is
    used for the first time, the result runs once on the meta device and its labels are compared with those of the
    full network.

    Args:
        module: The module that was traced, or one of the same structure.
        axes: Its axes.
        width: A fraction, a mapping per group, or what `axes.kept` returned.
        verify: Whether to check widths not checked before.

    Raises:
        ModelError: If the narrowed module does not run, or combines units that the full one keeps apart, or if most
            parameters of the network have the same size at every width.

    >>> from anysize.elastic.axes import trace
    >>> net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    >>> narrow(net, trace(net, torch.zeros(2, 3)), {"0": [1, 7]})[1].weight.shape
    torch.Size([2, 2])
    """
    kept = axes.kept(width)
    memo: dict[int, Any] = {}
    for name, tensor in stored(module).items():
        if not (axes.knows(name) or isinstance(tensor, nn.Parameter) or name in module.state_dict()):
            memo[id(tensor)] = None  # the forward made this buffer after the trace, and makes it again
        elif id(tensor) not in memo:
            small = take(tensor, axes.index(name, kept))
            own = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(small, tensor.requires_grad) if own else small
    with _PlainCopies():
        result = copied(module, memo)
    for path, part in reversed(list(result.named_modules())):  # parts before the modules that hold them
        rules = (LAYERS[kind] for kind in type(part).__mro__ if kind in LAYERS)
        for rule in list(rules)[:1]:
            rule(part, Cut(path, axes, kept))
    for dotted, value in axes.attributes(kept).items():
        assign(result, dotted, value)
    if verify and kept not in axes.verified:
        if kept != axes.kept(1.0):
            axes.check_shrinks()
        _verify(result, axes, kept)
        axes.verified.add(kept)
    return result


def _verify(small: nn.Module, axes: Axes, kept: Kept) -> None:
    """Run the narrowed module with the full network's classes as labels; refuse it if it fails or mixes them."""
    numbers = axes.found.classes
    fixed = torch.ones(int(numbers.max()) + 1, dtype=torch.bool)
    fixed[numbers[axes.found.group >= 0]] = False

    def known(name: str, tensor: Tensor) -> list[Tensor | None]:
        rows: list[Tensor | None] = []
        for atoms, index, size in zip(axes.found.atoms[name], axes.index(name, kept), tensor.shape):
            labels = None if atoms is None or size == 1 else numbers[atoms if index is None else atoms[index]]
            rows.append(labels)
        return rows

    try:
        run(
            small,
            axes.found.example,
            classes=Classes(fixed),
            heads=axes.found.heads,
            labels_of=known,
            released=lambda tracer, plane: True,
        )
    except ModelError:
        raise
    except Exception as error:
        place = getattr(error, "tracer_path", "") or "the network's own forward"
        raise ModelError(
            f"the narrowed network does not run, at {place} ({line_of(error) or 'inside PyTorch'}): {error}. "
            "A size there is written as a number: derive it from the input's shape or from an integer "
            "attribute of the module, name the attribute in trace(attributes={'path.name': 'group'}), or "
            "keep the layer whole with keep=[...]"
        ) from error
