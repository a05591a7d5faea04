"""One forward pass on the meta device, watched."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from anysize.elastic.skeleton import copied
from anysize.elastic.tracing import rules  # noqa: F401 - a rule is known once its module is loaded
from anysize.elastic.tracing.classes import Classes
from anysize.elastic.tracing.modules import wrap_leaf
from anysize.elastic.tracing.sizes import Attribute, Extent, SizeNote, TracedInt, attributes_in, compared, has_extent
from anysize.elastic.tracing.tracer import Heads, Tracer
from anysize.elastic.tracing.values import known_values, on_meta, plainly

_FACTORIES = ("zeros", "ones", "full", "empty")
_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Given:
    """One call of a torch function by Python code, and its result."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def axis(self, place: int) -> int:
        """The axis named `dim`, counted from the first."""
        return int(self.get(place, "dim", 0)) % int(self.args[0].dim())


class SizeWatch(TorchFunctionMode):
    """Records the sizes that Python code reads and passes, before they become plain numbers."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self.tracer.cut_by_size = name == "__getitem__" and _cut_by_size(args[1])
        result = func(*args, **kwargs)
        if self.tracer.paused:
            return result
        if func == _SHAPE or name in ("size", "numel", "nelement"):
            return self._asked(args[0], result, args[1:], kwargs, count=name in ("numel", "nelement"))
        if name in _NOTERS and isinstance(result, Tensor | tuple | list):
            if not args:  # all by keyword
                args = [value for key, value in kwargs.items() if key in ("input", "tensor", "self")]
            with self.tracer.pause(), plainly():
                _NOTERS[name](self, _Given(name, args, kwargs, result))
        return result

    def _asked(
        self, tensor: Tensor, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, count: bool
    ) -> Any:
        with self.tracer.pause(), plainly():
            extents = self.tracer.extents(tensor)
            whole = [TracedInt(e.size, e) if e.planes else e.size for e in extents]
        if count:
            return math.prod(sorted(whole, key=lambda size: isinstance(size, TracedInt)))  # plain sizes first
        if isinstance(result, int):
            return whole[kwargs.get("dim", args[0] if args else 0)]
        return torch.Size(whole)

    def made_anew(self, given: _Given) -> None:
        """A factory: the sizes."""
        sizes = given.args[1:] if given.name.startswith("new_") else given.args
        self._made(_listed(sizes, given.kwargs.get("size")), given.result)

    def counted(self, given: _Given) -> None:
        """A range: its length."""
        self._made(_counted(given.args, given.kwargs), given.result)

    def reshaped(self, given: _Given) -> None:
        """A view or an expansion: the new sizes."""
        named = given.kwargs.get("shape", given.kwargs.get("size"))
        self._sized(_listed(given.args[1:], named), given.result, 0)

    def unflattened(self, given: _Given) -> None:
        """One axis cut into several: their sizes."""
        self._sized(_listed(given.args[2:], given.kwargs.get("sizes")), given.result, given.axis(1))

    def normalised(self, given: _Given) -> None:
        """A norm over the last axes: their sizes."""
        sizes = _listed(given.args[1:2], given.kwargs.get("normalized_shape"))
        self._sized(sizes, given.args[0], given.args[0].dim() - len(sizes))

    def parted(self, given: _Given) -> None:
        """A split: the size of each part."""
        sizes = given.get(1, "split_size_or_sections", given.kwargs.get("split_size"))
        listed = [sizes] * len(given.result) if isinstance(sizes, int) else list(sizes or ())
        for size, part in zip(listed, given.result):
            self._sized([size], part, given.axis(2))

    def attended(self, given: _Given) -> None:
        """Torch's own attention: the channels that it is told to expect."""
        query = given.get(0, "query")
        self._sized([given.get(3, "embed_dim_to_check")], query, query.dim() - 1)

    def convolved(self, given: _Given) -> None:
        """A depthwise convolution: its groups are the channels."""
        groups = given.get(6, "groups", 1)
        if groups == given.args[0].shape[1]:
            self._sized([groups], given.args[0], 1)

    def narrowed(self, given: _Given) -> None:
        """A part of one axis: its length."""
        self._sized([given.get(3, "length")], given.result, given.axis(1))

    def indexed(self, given: _Given) -> None:
        """Slices: where those with known bounds begin and end."""
        tensor, index = given.args
        entries = _by_axis(index if isinstance(index, tuple) else (index,), tensor.dim())
        for extent, entry in zip(self.tracer.extents(tensor), entries):
            bounds = (entry.start, entry.stop) if isinstance(entry, slice) else ()
            for bound in bounds:
                if isinstance(bound, TracedInt) and 0 < bound <= extent.size:
                    cut = Extent(extent.planes, extent.axis, extent.size, int(bound))
                    self.tracer.notes.append(SizeNote(bound.expression, cut))

    def _sized(self, sizes: Sequence[Any], tensor: Tensor, start: int) -> None:
        """Note that axis `start + i` of a tensor has the size `sizes[i]`, unless that size only follows others."""
        extents = self.tracer.extents(tensor)
        loose = self.tracer.labels(tensor).loose
        for axis, size in enumerate(sizes, start):
            if isinstance(size, TracedInt) and axis < len(extents) and axis not in loose:
                self.tracer.notes.append(SizeNote(size.expression, extents[axis]))

    def _made(self, sizes: Sequence[Any], tensor: Tensor) -> None:
        """Label a factory's result along each axis whose size is a traced integer."""
        planes: list[Tensor] = []
        for axis, size in enumerate(sizes[: tensor.dim()]):
            if not isinstance(size, TracedInt) or size < 2 or size != tensor.shape[axis]:
                continue
            shape = [-1 if other == axis else 1 for other in range(tensor.dim())]
            if isinstance(size.expression, Extent):
                planes.extend(lane.reshape(shape) for lane in size.expression.lanes())
            elif attributes_in(size.expression):
                planes.append(self.tracer.classes.fresh(int(size)).reshape(shape))
        if planes:
            self.tracer.put(tensor, planes, neutral=True)
        self._sized(sizes, tensor, 0)


_NOTERS: dict[str, Callable[[SizeWatch, _Given], None]] = {
    **dict.fromkeys((f"{prefix}{name}" for prefix in ("", "new_") for name in _FACTORIES), SizeWatch.made_anew),
    **dict.fromkeys(("rand", "randn"), SizeWatch.made_anew),
    **dict.fromkeys(("view", "reshape", "expand", "_unsafe_view", "broadcast_to"), SizeWatch.reshaped),
    **dict.fromkeys(("layer_norm", "rms_norm"), SizeWatch.normalised),
    **dict.fromkeys(("split", "split_with_sizes"), SizeWatch.parted),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), SizeWatch.convolved),
    "arange": SizeWatch.counted,
    "multi_head_attention_forward": SizeWatch.attended,
    "unflatten": SizeWatch.unflattened,
    "narrow": SizeWatch.narrowed,
    "__getitem__": SizeWatch.indexed,
}
"""The functions that are given sizes, and what each says of them."""


def _cut_by_size(index: Any) -> bool:
    """Whether all bounds of an index's slices come from the size of an axis of units, as `b[: b.numel() // 3]`."""
    entries = index if isinstance(index, tuple) else (index,)
    bounds = [bound for entry in entries if isinstance(entry, slice) for bound in (entry.start, entry.stop) if bound]
    return bool(bounds) and all(isinstance(bound, TracedInt) and has_extent(bound.expression) for bound in bounds)


def _by_axis(entries: Sequence[Any], dims: int) -> list[Any]:
    """What an index asks of each axis; an empty list if it holds tensors or lists."""
    if any(isinstance(entry, Tensor | list) for entry in entries):
        return []
    own = [entry for entry in entries if entry is not None]
    if Ellipsis in own:
        place = own.index(Ellipsis)
        own[place : place + 1] = [slice(None)] * (dims - len(own) + 1)
    return own


def _listed(sizes: Sequence[Any], named: Any) -> Sequence[Any]:
    """Sizes given one by one, as one sequence, or by name."""
    if not sizes:
        return tuple(named) if isinstance(named, Sequence) else ()
    first = sizes[0]
    return tuple(first) if isinstance(first, Sequence) else sizes


def _counted(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """The size of a range, as an expression of its ends where they are whole numbers."""
    first, last, step = (kwargs.get(name) for name in ("start", "end", "step"))
    given = [*args[:3], *([None] * (3 - len(args)))]
    if len(args) == 1:
        last = given[0]
    elif args:
        first, last, step = given[0], given[1], given[2] if step is None else step
    ends: tuple[Any, ...] = (0 if first is None else first, last, 1 if step is None else step)
    if not all(isinstance(end, int) or (isinstance(end, float) and end.is_integer()) for end in ends) or ends[2] < 1:
        return ()
    start, stop, stride = (end if isinstance(end, int) else int(end) for end in ends)
    size = stop - start if start else stop
    return (size if stride == 1 else (size + (stride - 1)) // stride,)


class _MetaCopies(TorchFunctionMode):
    """While a module is copied, its tensors outside parameters and buffers become meta tensors too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.__deepcopy__:
            return on_meta(args[0])
        return func(*args, **(kwargs or {}))


def stored(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, under every name that it has; tied tensors appear several times."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def meta_copy(module: nn.Module) -> nn.Module:
    """The same module on the meta device; no contents are copied but those of small buffers of integers."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for tensor in stored(module).values():
            keep = isinstance(tensor, nn.Parameter)
            small = tensor.detach().to("meta") if keep else on_meta(tensor)
            memo[id(tensor)] = nn.Parameter(small, tensor.requires_grad) if keep else small
        with _MetaCopies():
            return copied(module, memo)


def _trace_integers(module: nn.Module) -> dict[str, int]:
    """The integers on the user's own modules by path; each is replaced by one that remembers its path."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        if not type(owner).__module__.startswith("torch.nn"):
            _trace_fields(owner, f"{path}." if path else "", found, seen)
    return found


def _trace_fields(owner: Any, prefix: str, found: dict[str, int], seen: set[int]) -> None:
    """Replace the integers among an object's fields, in its lists and tuples, and in objects of settings."""
    seen.add(id(owner))
    stateful = _keeps_state(owner)
    for name, value in list(vars(owner).items()):
        if stateful and type(value) is dict and not name.startswith("_"):
            owner.__dict__[name] = {key: _traced(part, f"{prefix}{name}[{key}]", found) for key, part in value.items()}
        elif stateful:
            continue
        elif type(value) in (int, list, tuple):
            owner.__dict__[name] = _traced(value, prefix + name, found)
        elif _holds_settings(value) and id(value) not in seen:
            _trace_fields(value, f"{prefix}{name}.", found, seen)
    if stateful:
        owner.__setstate__(owner.__getstate__())


def _keeps_state(owner: Any) -> bool:
    """Whether an object is copied by a state of its own, from which it derives its other fields (layers of einops)."""
    plain = getattr(nn.Module, "__getstate__", None)
    return isinstance(owner, nn.Module) and getattr(type(owner), "__getstate__", None) is not plain


def _traced(value: Any, path: str, found: dict[str, int]) -> Any:
    if type(value) is int and value > 1:
        found[path] = value
        return TracedInt(value, Attribute(path))
    if type(value) in (list, tuple) and any(type(part) in (int, list, tuple) for part in value):
        return type(value)(_traced(part, f"{path}[{place}]", found) for place, part in enumerate(value))
    return value


def _holds_settings(value: Any) -> bool:
    """Whether a deep copy copied this object field by field, such as the configuration that modules share."""
    kind: Any = type(value)
    plain = kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__
    special = callable(value) or isinstance(value, Tensor | nn.Module) or hasattr(kind, "__deepcopy__")
    return plain and not special and hasattr(value, "__dict__")


def assign(owner: Any, path: str, value: int) -> None:
    """Set an integer that tracing found, by its path."""
    steps = re.findall(r"[^.\[\]]+", path)
    _placed(owner, steps, value)


def _placed(owner: Any, steps: Sequence[str], value: Any) -> Any:
    """What stands in the place of `owner` once the value at the end of these steps is set."""
    if not steps:
        return value
    if isinstance(owner, list | tuple):
        parts = [_placed(part, steps[1:], value) if str(n) == steps[0] else part for n, part in enumerate(owner)]
        return type(owner)(parts)
    if isinstance(owner, dict):
        return {key: _placed(part, steps[1:], value) if key == steps[0] else part for key, part in owner.items()}
    new = _placed(getattr(owner, steps[0]), steps[1:], value)
    if steps[0] in vars(owner):
        vars(owner)[steps[0]] = new
    if _keeps_state(owner):
        owner.__setstate__(owner.__getstate__())
    return owner


_SIZED_LAYERS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    nn.Unflatten,
)


def _watch_modules(tracer: Tracer, module: nn.Module) -> None:
    """Keep the running module on top of `tracer.stack`, and note sizes at layers that store them."""

    def enter(path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            tracer.stack.append(path)
            if isinstance(layer, _SIZED_LAYERS) and args and isinstance(args[0], Tensor):
                with tracer.pause():
                    tracer.inputs.setdefault(path, tracer.extents(args[0]))

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            tracer.stack.pop()
            if isinstance(layer, _SIZED_LAYERS) and isinstance(result, Tensor):
                with tracer.pause():
                    tracer.outputs.setdefault(path, tracer.extents(result))

        return hook

    for path, layer in module.named_modules():
        layer.register_forward_pre_hook(enter(path))
        layer.register_forward_hook(leave(path))
        wrap_leaf(tracer, layer)


LabelsOf = Callable[[str, Tensor], Sequence[Tensor | None]]


@dataclass
class Run:
    """One traced forward: the tracer with all that it found, and the labelled outputs."""

    tracer: Tracer
    attributes: dict[str, int]
    atoms: dict[str, tuple[Tensor | None, ...]]
    outputs: list[tuple[Extent, ...]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def run(
    module: nn.Module,
    example: tuple[Tensor, ...],
    *,
    classes: Classes,
    heads: Heads,
    labels_of: LabelsOf,
    pick: Callable[[Any], Any] | None = None,
    released: Callable[[Tracer, Tensor], bool] | None = None,
    atoms: dict[str, tuple[Tensor | None, ...]] | None = None,
) -> Run:
    """The labels of one forward of `module` on the meta device; the module itself is left untouched.

    Errors of the forward propagate unchanged, with `tracer_path` set to the module that ran.
    """
    network = meta_copy(module).eval()
    tracer = Tracer(classes, heads)
    if released is not None:
        tracer.released = released
    found = Run(tracer, _trace_integers(network), {} if atoms is None else atoms)
    tensors: dict[int, tuple[Tensor, tuple[Tensor | None, ...]]] = {}
    own = stored(network)  # before the forward, which may put other tensors in the place of buffers
    for name, tensor in own.items():
        if id(tensor) not in tensors:
            tensors[id(tensor)] = (tensor, tuple(labels_of(name, tensor)))
            tracer.adopt(tensor, name, tensors[id(tensor)][1])
        found.atoms[name] = tensors[id(tensor)][1]
    _watch_modules(tracer, network)
    given = tuple(on_meta(part) for part in example)
    try:
        result = _forward(network, given, tracer)
    except Exception as error:
        error.tracer_path = tracer.stack[-1]  # type: ignore[attr-defined]
        raise
    chosen = pick(result) if pick is not None else result
    leaves = [leaf for leaf in tree_flatten(chosen)[0] if isinstance(leaf, Tensor)]
    for leaf in leaves:
        tracer.read(leaf)
    found.outputs = [tracer.extents(leaf) for leaf in leaves]
    found.unused = _unread(own, tracer)
    if any(isinstance(own[name], nn.Parameter) for name in found.unused):
        _train_too(network, given, tracer)
        found.unused = _unread(own, tracer)
    return found


def _unread(tensors: Mapping[str, Tensor], tracer: Tracer) -> list[str]:
    return [name for name, tensor in tensors.items() if id(tensor) not in tracer.seen]


def _train_too(network: nn.Module, given: tuple[Tensor, ...], tracer: Tracer) -> None:
    """Follow a forward in training mode too, for parameters that are read only there; all it returns keeps its size.

    If it cannot run without data, nothing of it counts.
    """
    before = tracer.snapshot()
    draws = numpy.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            result = _forward(network.train(), given, tracer)
    except Exception:  # a user's forward may raise anything
        tracer.restore(before)
        return
    finally:
        numpy.random.set_state(draws[0])
        random.setstate(draws[1])
        network.eval()
    for leaf in (leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)):
        tracer.read(leaf)
        for plane in (plane for extent in tracer.extents(leaf) for plane in extent.planes):
            tracer.classes.pin(plane)


@contextmanager
def unread_masks() -> Iterator[None]:
    """Inside, torch's transformer layers do not read the values of a mask, which they do to choose a faster kernel."""
    layers: Any = nn.modules.transformer
    detect = layers._detect_is_causal_mask
    layers._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        layers._detect_is_causal_mask = detect


@contextmanager
def forgetful_einops() -> Iterator[None]:
    """Inside, einops computes sizes anew: it remembers them by number, but here a size stands for one axis."""
    library: Any = sys.modules.get("einops.einops")
    if not hasattr(library, "_reconstruct_from_shape_uncached"):
        yield
        return
    remembering = library._reconstruct_from_shape
    library._reconstruct_from_shape = library._reconstruct_from_shape_uncached
    try:
        yield
    finally:
        library._reconstruct_from_shape = remembering


@contextmanager
def autocast_as_on_cpu() -> Iterator[None]:
    """Inside, code may ask for automatic precision on the device of its tensors; the meta device has none."""
    kind: Any = torch.amp.autocast_mode.autocast
    original = kind.__init__

    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    kind.__init__ = on_cpu
    try:
        yield
    finally:
        kind.__init__ = original


@contextmanager
def without_data() -> Iterator[None]:
    """For passes on the meta device: tensors that a network creates are there too, and no path depends on data.

    Torch's transformer layers also have a fused path, which hides its operations; it is switched off.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with unread_masks(), autocast_as_on_cpu(), known_values():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _forward(network: nn.Module, given: tuple[Tensor, ...], tracer: Tracer) -> Any:
    with ExitStack() as stack:
        stack.enter_context(without_data())
        stack.enter_context(forgetful_einops())
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        stack.enter_context(SizeWatch(tracer))
        stack.enter_context(compared(tracer.hear))
        stack.enter_context(tracer)
        return network(*given)
