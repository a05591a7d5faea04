"""One forward pass on the meta device, watched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from anysize.elastic.tracing import rules  # noqa: F401 - a rule is known once its module is loaded
from anysize.elastic.tracing.classes import Classes
from anysize.elastic.tracing.modules import wrap_leaf
from anysize.elastic.tracing.sizes import Attribute, Extent, SizeNote, TracedInt, attributes_in
from anysize.elastic.tracing.tracer import Heads, Tracer

_FACTORIES = frozenset(f"{prefix}{name}" for prefix in ("", "new_") for name in ("zeros", "ones", "full", "empty")) | {
    "rand",
    "randn",
    "arange",
}


_RESHAPES = frozenset(("view", "reshape", "expand", "_unsafe_view", "broadcast_to"))


_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


class SizeWatch(TorchFunctionMode):
    """Records the sizes that Python code reads and passes, before they become plain numbers."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.tracer.paused:
            return result
        name = getattr(func, "__name__", "")
        if func == _SHAPE or name == "size":
            return self._asked(args[0], result, args[1:], kwargs)
        if isinstance(result, Tensor) or name in ("split", "split_with_sizes"):
            with self.tracer.pause():
                self._given(name, args, kwargs, result)
        return result

    def _asked(self, tensor: Tensor, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with self.tracer.pause():
            extents = self.tracer.extents(tensor)
            whole = [TracedInt(e.size, e) if e.planes else e.size for e in extents]
        if isinstance(result, int):
            return whole[kwargs.get("dim", args[0] if args else 0)]
        return torch.Size(whole)

    def _given(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if name in _FACTORIES:
            sizes = args[1:] if name.startswith("new_") else args
            self._made(_listed(sizes, kwargs.get("size")), result)
        elif name in _RESHAPES:
            self._sized(_listed(args[1:], kwargs.get("shape", kwargs.get("size"))), result, 0)
        elif name == "unflatten":
            sizes = _listed(args[2:], kwargs.get("sizes"))
            self._sized(sizes, result, int(kwargs.get("dim", args[1] if len(args) > 1 else 0)) % args[0].dim())
        elif name in ("layer_norm", "rms_norm"):
            sizes = _listed(args[1:2], kwargs.get("normalized_shape"))
            self._sized(sizes, args[0], args[0].dim() - len(sizes))
        elif name in ("split", "split_with_sizes"):
            self._parted(args, kwargs, result)
        elif name == "narrow":
            self._sized(args[3:4], result, int(args[1]) % args[0].dim())
        elif name == "__getitem__":
            self._cut(args[0], args[1])

    def _sized(self, sizes: Sequence[Any], tensor: Tensor, start: int) -> None:
        """Note that axis `start + i` of a tensor has the size `sizes[i]`."""
        extents = self.tracer.extents(tensor)
        for axis, size in enumerate(sizes, start):
            if isinstance(size, TracedInt) and axis < len(extents):
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

    def _parted(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given = args[1] if len(args) > 1 else kwargs.get("split_size_or_sections", kwargs.get("split_size"))
        axis = int(kwargs.get("dim", args[2] if len(args) > 2 else 0)) % args[0].dim()
        sizes = [given] * len(result) if isinstance(given, int) else list(given or ())
        for size, part in zip(sizes, result):
            self._sized([size], part, axis)

    def _cut(self, tensor: Tensor, index: Any) -> None:
        """Note where slices with known bounds begin and end."""
        entries = index if isinstance(index, tuple) else (index,)
        if any(entry is None or entry is Ellipsis or isinstance(entry, Tensor) for entry in entries):
            return
        for extent, entry in zip(self.tracer.extents(tensor), entries):
            bounds = (entry.start, entry.stop) if isinstance(entry, slice) else ()
            for bound in bounds:
                if isinstance(bound, TracedInt) and 0 < bound <= extent.size:
                    cut = Extent(extent.planes, extent.axis, extent.size, int(bound))
                    self.tracer.notes.append(SizeNote(bound.expression, cut))


def _listed(sizes: Sequence[Any], named: Any) -> Sequence[Any]:
    """Sizes given one by one, as one sequence, or by name."""
    if not sizes:
        return tuple(named) if isinstance(named, Sequence) else ()
    first = sizes[0]
    return tuple(first) if isinstance(first, Sequence) else sizes


class _MetaCopies(TorchFunctionMode):
    """While a module is copied, its tensors outside parameters and buffers become meta tensors too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.__deepcopy__:
            return torch.empty_like(args[0], device="meta", requires_grad=False)
        return func(*args, **(kwargs or {}))


def stored(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, under every name that it has; tied tensors appear several times."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def meta_copy(module: nn.Module) -> nn.Module:
    """The same module on the meta device; no tensor's contents are copied."""
    memo: dict[int, Any] = {}
    with torch.no_grad():
        for tensor in stored(module).values():
            small = tensor.detach().to("meta")
            keep = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(small, tensor.requires_grad) if keep else small
        with _MetaCopies():
            return copy.deepcopy(module, memo)


def _trace_integers(module: nn.Module) -> dict[str, int]:
    """The integers on the user's own modules by path; each is replaced by one that remembers its path."""
    found = {}
    for path, owner in module.named_modules():
        if type(owner).__module__.startswith("torch.nn"):
            continue
        for name, value in list(vars(owner).items()):
            if type(value) is int and value > 1:
                dotted = f"{path}.{name}" if path else name
                found[dotted] = value
                owner.__dict__[name] = TracedInt(value, Attribute(dotted))
    return found


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
    for name, tensor in stored(network).items():
        if id(tensor) not in tensors:
            tensors[id(tensor)] = (tensor, tuple(labels_of(name, tensor)))
            tracer.adopt(tensor, name, tensors[id(tensor)][1])
        found.atoms[name] = tensors[id(tensor)][1]
    _watch_modules(tracer, network)
    given = tuple(torch.empty_like(part, device="meta", requires_grad=False) for part in example)
    try:
        result = _forward(network, given, tracer)
    except Exception as error:
        error.tracer_path = tracer.stack[-1]  # type: ignore[attr-defined]
        raise
    chosen = pick(result) if pick is not None else result
    leaves = [leaf for leaf in tree_flatten(chosen)[0] if isinstance(leaf, Tensor)]
    found.outputs = [tracer.extents(leaf) for leaf in leaves]
    found.unused = [name for name, tensor in stored(network).items() if id(tensor) not in tracer.seen]
    return found


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
def without_data() -> Iterator[None]:
    """For passes on the meta device: tensors that a network creates are there too, and no path depends on values.

    Torch's transformer layers also have a fused path, which hides its operations; it is switched off.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with unread_masks(), torch.device("meta"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _forward(network: nn.Module, given: tuple[Tensor, ...], tracer: Tracer) -> Any:
    with ExitStack() as stack:
        stack.enter_context(without_data())
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        stack.enter_context(SizeWatch(tracer))
        stack.enter_context(tracer)
        return network(*given)
