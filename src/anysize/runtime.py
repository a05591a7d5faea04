"""For devices: load a bundle, and switch its size and its robustness between two predictions.

    network = load("net.anysize", size="0.25")
    logits = network(x)                     # x as raw inputs, images in [0, 1]
    network.switch("1.0", robustness=0.3)
    logits = network(x)

This file needs only PyTorch and safetensors, and nothing else from this package: it can be copied to a device alone.

A bundle is one safetensors file. Its tensors are stored once. Its note, a JSON object, says for every size which
tensors the network uses, and which part of each, and lists the network's operations. Nothing in it is code: operations
are looked up in a fixed list, and before a network is first used, it is tried on the meta device, where nothing is
allocated; what does not fit is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

FORMAT = "anysize-bundle-1"
NOTE = "anysize"
SMALL = "small"
"""The name of the tensor that holds all small ones in a row, since each would need an entry in the file's header."""

_MOST_NODES = 100_000
_MOST_BYTES = 1 << 30  # limit on one intermediate value, per sample
_PIECE = 1 << 20

# Pure functions of their arguments: none draws random numbers, writes to its inputs, or reads outside its tensors.
_ALLOWED = """
_native_batch_norm_legit_no_training.default _softmax.default _log_softmax.default _to_copy.default
_unsafe_view.default abs.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
_adaptive_avg_pool2d.default _adaptive_avg_pool3d.default adaptive_max_pool1d.default adaptive_max_pool2d.default
add.Scalar add.Tensor addmm.default alias.default amax.default amin.default arange.default arange.start
arange.start_step argmax.default argmin.default avg_pool1d.default avg_pool2d.default avg_pool3d.default
baddbmm.default batch_norm.default bmm.default cat.default ceil.default chunk.default clamp.default clamp_max.default
clamp_min.default clone.default concat.default constant_pad_nd.default contiguous.default conv1d.default
conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding conv_transpose1d.default
conv_transpose2d.input conv_transpose3d.input convolution.default cos.default cumsum.default detach.default div.Scalar
div.Tensor div.Tensor_mode dropout.default einsum.default elu.default embedding.default eq.Scalar eq.Tensor
erf.default exp.default expand.default expand_as.default expm1.default flatten.using_ints flip.default floor.default
floor_divide.default full.default full_like.default gather.default ge.Scalar ge.Tensor gelu.default glu.default
group_norm.default gru.input gt.Scalar gt.Tensor hardsigmoid.default hardswish.default hardtanh.default index.Tensor
index_select.default instance_norm.default layer_norm.default le.Scalar le.Tensor leaky_relu.default
lift_fresh_copy.default linalg_vector_norm.default linear.default log.default log_softmax.int log_sigmoid.default
_trilinear.default logical_and.default
logical_not.default logical_or.default logsumexp.default lstm.input lt.Scalar lt.Tensor masked_fill.Scalar
matmul.default max.dim max_pool1d.default max_pool2d.default max_pool2d_with_indices.default max_pool3d.default
maximum.default mean.default mean.dim min.dim minimum.default mish.default mm.default mul.Scalar mul.Tensor narrow.int
native_group_norm.default native_layer_norm.default ne.Scalar ne.Tensor neg.default new_zeros.default new_ones.default
new_full.default ones.default ones_like.default pad.default permute.default pixel_shuffle.default
pixel_unshuffle.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prelu.default prod.dim_int reciprocal.default
relu.default relu6.default repeat.default repeat_interleave.self_int reshape.default rms_norm.default rnn_relu.input
rnn_tanh.input roll.default round.default rsqrt.default rsub.Scalar scalar_tensor.default
scaled_dot_product_attention.default select.int selu.default sigmoid.default sign.default silu.default sin.default
slice.Tensor softmax.int softplus.default split.Tensor split_with_sizes.default sqrt.default square.default
squeeze.default squeeze.dim squeeze.dims stack.default std.correction sub.Scalar sub.Tensor sum.default
sum.dim_IntList t.default tanh.default tile.default to.dtype transpose.int tril.default triu.default unbind.int
unflatten.int unsqueeze.default upsample_bilinear2d.vec upsample_nearest2d.vec var.correction var_mean.correction
view.default where.ScalarOther where.ScalarSelf where.self zeros.default zeros_like.default
"""
_OPERATIONS = frozenset(f"aten.{name}" for name in _ALLOWED.split())
# Functions of numbers: the batch size and what is computed from it.
_ON_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "neg": operator.neg,
    "size": lambda tensor, axis: int(tensor.shape[axis]),
}
_CONSTANTS: Mapping[str, Any] = {
    str(value).removeprefix("torch."): value
    for value in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.contiguous_format, torch.preserve_format, torch.channels_last),
    )
}
_INTEGERS = (torch.int64, torch.int32)

Recipe = int | list[Any] | dict[str, Any]
"""How to make a network's tensor: the number of a stored tensor, which is negative for a small one; [number, parts of
its axes, divisor]; or {"product": [coefficients, basis]}."""


class BundleError(Exception):
    """A bundle is damaged, was not written by anysize, or cannot do what was asked."""


def load(path: str | Path, size: str | None = None, robustness: float | None = None, *, verify: bool = True) -> Network:
    """The network in a bundle, by default at its largest size and its default robustness.

    Args:
        path: a file that `anysize customize --bundle` wrote.
        size: the label of one of its sizes.
        robustness: between 0 (accurate) and 1 (robust), for bundles of robust networks.
        verify: read the whole file once and compare its checksum; False reads no more than the size needs.
    """
    source = _Source(Path(path))
    if verify:
        source.verify()
    return Network(source, source.checked()).switch(size, robustness)


def known_operation(name: str) -> bool:
    """Whether a bundle may hold the operation.

    >>> known_operation("aten.conv2d.default"), known_operation("aten.set_.source_Tensor")
    (True, False)
    """
    return name in _OPERATIONS or name in _ON_NUMBERS


def constant_name(value: Any) -> str | None:
    """The name by which a bundle writes a dtype or a memory format; None for those that it cannot hold.

    >>> constant_name(torch.float32)
    'float32'
    """
    return next((name for name, known in _CONSTANTS.items() if known is value), None)


def digest(note: Mapping[str, Any], data: Iterator[bytes]) -> str:
    """The checksum of a bundle's note (without the checksum itself) and its tensors' bytes."""
    plain = {key: value for key, value in note.items() if key != "sha256"}
    total = hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
    for piece in data:
        total.update(piece)
    return total.hexdigest()


class Network:
    """A bundle's networks; one of them is in use. Networks used before stay in memory until `forget`."""

    def __init__(self, source: _Source, note: _Note) -> None:
        self._source = source
        self._note = note
        self._graphs: dict[int, _Program] = {}
        self._plain: dict[str, list[Tensor]] = {}
        self._levels: dict[str, _Levels] = {}
        self._ready: dict[tuple[str, float | None], list[Tensor]] = {}
        self._size = note.sizes[-1]
        self._robustness: float | None = None
        self._program: _Program | None = None
        self._tensors: list[Tensor] = []

    @property
    def sizes(self) -> tuple[str, ...]:
        """The labels of its sizes, smallest first."""
        return self._note.sizes

    @property
    def size(self) -> str:
        """The size in use."""
        return self._size

    @property
    def robustness(self) -> float | None:
        """The robustness in use; None if the bundle has no choice."""
        return self._robustness

    @property
    def levels(self) -> tuple[float, ...]:
        """The values that `robustness` may have; with two, also all between them; empty if there is no choice."""
        return tuple(self._note.networks[self._size].levels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self._note.input_shape

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, if the data had any."""
        return self._note.class_names

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts about the run, and the normalisation that the network applies to its inputs: mean and std, or None."""
        return self._note.about

    def switch(self, size: str | None = None, robustness: float | None = None) -> Network:
        """This object, now using another size or robustness; None leaves either as it is."""
        label = self._size if size is None else size
        if label not in self._note.networks:
            raise BundleError(f"there is no size '{label}' in the bundle; it has {', '.join(self.sizes)}")
        layout = self._note.networks[label]
        level = self._level(layout, self._robustness if robustness is None else robustness)
        if (label, level) not in self._ready:
            self._ready[label, level] = self._assembled(label, layout, level)
        self._program, self._tensors = self._graphs[layout.graph], self._ready[label, level]
        self._size, self._robustness = label, level
        return self

    def forget(self) -> None:
        """Free the memory of every network but the one in use."""
        kept = (self._size, self._robustness)
        self._ready = {kept: self._tensors}
        self._plain.clear()
        self._levels.clear()
        self._source.forget()

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs for a batch of raw inputs of shape `(N, *input_shape)`."""
        if tuple(x.shape[1:]) != self.input_shape or x.dim() == 0:
            raise BundleError(
                f"inputs have shape {tuple(x.shape)}; expected (N, {', '.join(map(str, self.input_shape))})"
            )
        if self._note.tokens and x.dtype not in _INTEGERS:
            raise BundleError(f"inputs are {x.dtype}; expected tokens as int64")
        if not self._note.tokens and x.dtype != torch.float32:
            raise BundleError(f"inputs are {x.dtype}; expected float32, images in [0, 1]")
        assert self._program is not None
        with torch.inference_mode():
            return self._program.run(x, self._tensors)

    def predict(self, x: Tensor) -> list[str]:
        """The name of the likeliest class of each sample, or its number if classes have no names."""
        outputs = self(x)
        if outputs.dim() != 2:
            raise BundleError(f"outputs have shape {tuple(outputs.shape)}; predict needs outputs (N, classes)")
        names = self.class_names
        return [str(i) if names is None else names[i] for i in outputs.argmax(1).tolist()]

    def _level(self, layout: _Layout, asked: float | None) -> float | None:
        levels = layout.levels
        if not levels:
            if asked is not None:
                raise BundleError(f"robustness {asked:g} was asked for; this bundle was not trained for robustness")
            return None
        level = layout.default if asked is None else float(asked)
        allowed = levels[0] <= level <= levels[-1] if layout.mixes else level in levels
        if not allowed:
            what = f"{levels[0]:g} to {levels[-1]:g}" if layout.mixes else ", ".join(f"{one:g}" for one in levels)
            raise BundleError(f"robustness {level:g} was asked for; allowed: {what}")
        return level

    def _assembled(self, label: str, layout: _Layout, level: float | None) -> list[Tensor]:
        """The tensors of a network at a level, in the order of its program's inputs."""
        with torch.inference_mode():
            if label not in self._plain:
                self._plain[label] = self._tried(layout)
            tensors = list(self._plain[label])
            if level is None:
                return tensors
            if label not in self._levels:
                self._levels[label] = self._source.levels(layout, tensors)
            for place, tensor in zip(layout.robust, self._levels[label].at(level, layout)):
                tensors[place] = tensor
        return tensors

    def _tried(self, layout: _Layout) -> list[Tensor]:
        """The tensors of a size, after its program ran with them on the meta device."""
        if layout.graph not in self._graphs:
            with self._source.blamed():
                self._graphs[layout.graph] = _Program(self._note.graphs[layout.graph])
        tensors = [self._source.make(recipe) for recipe in layout.tensors]
        self._graphs[layout.graph].trial(self._note, tensors)
        return tensors


# The note -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    """One size: its program, and how its tensors are made.

    Attributes:
        graph: the number of its program.
        tensors: a recipe for each tensor of the program.
        robust: for some tensors other recipes, one for each level.
        levels: the levels of robustness, ascending.
        mixes: whether every level between two is a mixture of them.
        default: the level in use if none is asked for.
    """

    graph: int
    tensors: list[Recipe]
    robust: dict[int, list[Recipe]]
    levels: list[float]
    mixes: bool
    default: float


@dataclass(frozen=True)
class _Note:
    """The contents of a bundle's note."""

    sizes: tuple[str, ...]
    networks: dict[str, _Layout]
    graphs: list[dict[str, Any]]
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    tokens: bool
    class_names: tuple[str, ...] | None
    about: dict[str, Any]


def _read_note(note: Mapping[str, Any]) -> _Note:
    """The note, with its parts checked for type; whether they fit together shows when a network is tried."""
    networks = {str(entry["size"]): _read_layout(entry) for entry in note["networks"]}
    names = note["class_names"]
    read = _Note(
        sizes=tuple(networks),
        networks=networks,
        graphs=[dict(graph) for graph in note["graphs"]],
        input_shape=_shape(note["input_shape"]),
        output_shape=_shape(note["output_shape"]),
        tokens=bool(note["tokens"]),
        class_names=None if names is None else tuple(str(name) for name in names),
        about=dict(note["about"]),
    )
    _demand(bool(networks), "it holds no network")
    _demand(all(0 <= layout.graph < len(read.graphs) for layout in networks.values()), "a size has no program")
    return read


def _read_layout(entry: Mapping[str, Any]) -> _Layout:
    robust = entry.get("robust") or {"levels": [], "mixes": False, "tensors": {}, "default": 0.0}
    levels = [float(level) for level in robust["levels"]]
    tensors = list(entry["tensors"])
    others = {int(place): list(recipes) for place, recipes in robust["tensors"].items()}
    _demand(levels == sorted(set(levels)), "its levels of robustness are out of order")
    _demand(not robust["mixes"] or len(levels) == 2, "mixed robustness needs two ends")
    _demand(all(0 <= place < len(tensors) for place in others), "a robust tensor has no place")
    _demand(all(len(recipes) == len(levels) for recipes in others.values()), "a level of robustness lacks a tensor")
    graph, default = entry["graph"], float(robust["default"])
    _demand(type(graph) is int, "a program's number is not a number")
    return _Layout(graph, tensors, others, levels, bool(robust["mixes"]), default)


def _shape(values: Sequence[Any]) -> tuple[int, ...]:
    _demand(all(type(value) is int and value > 0 for value in values), f"{values} is not a shape")
    return tuple(values)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


# The tensors --------------------------------------------------------------------------------------


class _Source:
    """The file: reads only the parts of its tensors that are needed, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[int, Tensor] = {}
        try:
            opener: Any = safetensors.safe_open
            self._file = opener(path, "pt")
            text = (self._file.metadata() or {})[NOTE]
            self._raw = json.loads(text)
            _demand(isinstance(self._raw, dict) and self._raw.get("format") == FORMAT, f"its format is not {FORMAT}")
            whole = [_Stored(str(key), self._shape_of(key), None) for key in self._raw["whole"]]
            self._stored = dict(enumerate(whole)) | _packed(self._raw["small"])
        except FileNotFoundError:
            raise BundleError(f"{path} does not exist") from None
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror or error}") from None
        except KeyError as error:
            raise BundleError(f"{path} is not an anysize bundle: it has no {error}") from None
        except (safetensors.SafetensorError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BundleError(f"{path} is damaged or not an anysize bundle ({error})") from None

    def verify(self) -> None:
        """Refuse a file whose checksum is not the one that it was written with."""
        if digest(self._raw, self._data()) != self._raw.get("sha256"):
            raise BundleError(f"{self._path} is damaged: its checksum is not the one that it was written with")

    def checked(self) -> _Note:
        """The checked note."""
        with self.blamed():
            return _read_note(self._raw)

    def make(self, recipe: Recipe) -> Tensor:
        """The tensor of a recipe; if possible, a view of a tensor that is already in memory."""
        with self.blamed():
            return self._made(recipe)

    def levels(self, layout: _Layout, tensors: Sequence[Tensor]) -> _Levels:
        """The tensors that differ between levels of robustness, at each level; shaped as in `tensors`."""
        with self.blamed():
            shapes = [tensors[place].shape for place in layout.robust]
            rows = []
            for level in range(len(layout.levels)):
                made = [self._made(recipes[level]) for recipes in layout.robust.values()]
                for tensor, shape in zip(made, shapes):
                    _demand(
                        tensor.shape == shape, f"a robust tensor has shape {tuple(tensor.shape)}, not {tuple(shape)}"
                    )
                    _demand(tensor.dtype == torch.float32, f"a robust tensor is {tensor.dtype}, not float32")
                rows.append(torch.cat([tensor.reshape(-1) for tensor in made] or [torch.empty(0)]))
            return _Levels(rows, shapes)

    def forget(self) -> None:
        """Drop what was read; networks in use keep their tensors."""
        self._read.clear()

    def _made(self, recipe: Recipe) -> Tensor:
        if isinstance(recipe, dict):
            coefficients, basis = (self._made(part) for part in recipe["product"])
            return _composed(coefficients, basis)
        number, axes, divisor = (recipe, [], None) if isinstance(recipe, int) else (*recipe, None)[:3]
        _demand(type(number) is int and number in self._stored, f"tensor {number} is not stored")
        tensor = self._part(number, axes)
        return tensor if divisor is None else tensor / float(divisor)

    def _part(self, number: int, axes: list[Any]) -> Tensor:
        """A part of a stored tensor: per axis null (all), a count (the first entries) or runs [start, count]."""
        stored = self._stored[number]
        asked = [*axes, *[None] * (len(stored.shape) - len(axes))]
        _demand(len(asked) == len(stored.shape), f"tensor {number} has no axis {len(asked) - 1}")
        ends = [_end(part, size) for part, size in zip(asked, stored.shape)]
        known = self._read.get(number)
        if known is None or any(have < need for have, need in zip(known.shape, ends)):
            known = self._read[number] = self._fetch(stored, ends)
        for axis, (part, end) in enumerate(zip(asked, ends)):
            if isinstance(part, list):
                rows = [row for start, count in part for row in range(start, start + count)]
                known = known.index_select(axis, torch.tensor(rows))
            elif known.shape[axis] != end:
                known = known.narrow(axis, 0, end)
        return known

    def _fetch(self, stored: _Stored, ends: Sequence[int]) -> Tensor:
        """The first entries of a stored tensor along each axis."""
        lazy = self._file.get_slice(stored.key)
        if stored.offset is None:
            part: Tensor = lazy[tuple(slice(0, end) for end in ends)] if ends else self._file.get_tensor(stored.key)
            return part.contiguous()
        row = math.prod(stored.shape[1:])
        length = row * ends[0] if ends else 1
        _demand(stored.offset + length <= lazy.get_shape()[0], f"{stored.key} ends before its part at {stored.offset}")
        flat: Tensor = lazy[stored.offset : stored.offset + length]
        whole = flat.reshape(ends[0], *stored.shape[1:]) if ends else flat.reshape(())
        return whole[tuple(slice(0, end) for end in ends)].clone()

    def _shape_of(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def _data(self) -> Iterator[bytes]:
        """The bytes of all tensors, in pieces."""
        with open(self._path, "rb") as file:
            file.seek(int.from_bytes(file.read(8), "little"), 1)
            while piece := file.read(_PIECE):
                yield piece

    def blamed(self) -> _Blamed:
        """Turn any error inside into an error about this file."""
        return _Blamed(self._path)


@dataclass(frozen=True)
class _Levels:
    """The tensors that change with robustness, joined into one per level, so that all are mixed at once."""

    rows: list[Tensor]
    shapes: list[torch.Size]

    def at(self, level: float, layout: _Layout) -> list[Tensor]:
        """The tensors at a level: those of the level, or a mixture of those at the two ends."""
        if layout.mixes:
            low, high = layout.levels
            row = torch.lerp(self.rows[0], self.rows[1], (level - low) / (high - low))
        else:
            row = self.rows[layout.levels.index(level)]
        parts = torch.split_with_sizes(row, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]


@dataclass(frozen=True)
class _Stored:
    """A tensor in the file: a whole one or, with an offset, a part of the tensor that holds the small ones."""

    key: str
    shape: tuple[int, ...]
    offset: int | None


def _packed(shapes: Sequence[Sequence[Any]]) -> dict[int, _Stored]:
    """The small tensors, numbered from -1 downwards."""
    found: dict[int, _Stored] = {}
    offset = 0
    for number, shape in enumerate(shapes, start=1):
        found[-number] = _Stored(SMALL, _shape(shape), offset)
        offset += math.prod(shape)
    return found


@dataclass(frozen=True)
class _Blamed:
    """Turns any error inside into an error that blames the file."""

    path: Path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, KeyError):
            raise BundleError(f"{self.path} is damaged: it has no {error}") from None
        if isinstance(error, Exception) and not isinstance(error, BundleError):
            raise BundleError(
                f"{self.path} is damaged ({str(error).splitlines()[0] if str(error) else error})"
            ) from None


def _end(part: Any, size: int) -> int:
    """How many entries of an axis, from the first on, cover a part."""
    if part is None:
        return size
    runs = part if isinstance(part, list) else [[0, part]]
    fits = all(type(n) is int and n >= 0 for run in runs for n in run) and all(len(run) == 2 for run in runs)
    _demand(bool(runs) and fits, f"{part} is not a part of an axis")
    end = max(start + count for start, count in runs)
    _demand(0 < end <= size and sum(count for _, count in runs) <= size, f"{part} is not a part of an axis of {size}")
    return int(end)


def _composed(coefficients: Tensor, basis: Tensor) -> Tensor:
    """The weight (T, S, *k) that coefficients (T, S / R1, R2) make of a basis (R2, R1, *k)."""
    outputs, fragments, size = coefficients.shape
    flat = coefficients.reshape(outputs * fragments, size) @ basis.reshape(size, -1)
    return flat.reshape(outputs, fragments * basis.shape[1], *basis.shape[2:])


# The program --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """One operation: its function, its arguments as written, and which values no later operation needs."""

    function: Callable[..., Any]
    arguments: list[Any]
    options: dict[str, Any]
    done: tuple[int, ...]


class _Program:
    """A network's operations in order. Value 0 is the input; each operation makes the next value."""

    def __init__(self, graph: Mapping[str, Any]) -> None:
        nodes = unrolled(graph)
        _demand(0 < len(nodes) <= _MOST_NODES, f"{len(nodes)} operations")
        self._names = [str(name) for name in graph["operations"]]
        foreign = sorted({name for name in self._names if not known_operation(name)})
        if foreign:
            raise BundleError(f"the bundle asks for operations that are not allowed: {', '.join(foreign)}")
        self._functions = [_function(name) for name in self._names]
        self._output = graph["output"]
        _demand(type(self._output) is int and 0 <= self._output <= len(nodes), "the output is not a value")
        last = {value: place for place, node in enumerate(nodes) for value in _values(node[1:])}
        ending: dict[int, list[int]] = {}
        for value, place in last.items():
            if value != self._output:
                ending.setdefault(place, []).append(value)
        self._nodes = [self._node(node, place, ending.get(place, [])) for place, node in enumerate(nodes)]

    def run(self, x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The output for an input."""
        values: list[Any] = [x, *[None] * len(self._nodes)]
        for place, node in enumerate(self._nodes):
            arguments = [_filled(argument, values, tensors) for argument in node.arguments]
            options = {name: _filled(value, values, tensors) for name, value in node.options.items()}
            values[place + 1] = node.function(*arguments, **options)
            for value in node.done:
                values[value] = None
        output: Tensor = values[self._output]
        return output

    def trial(self, note: _Note, tensors: Sequence[Tensor]) -> None:
        """Refuse a program that does not run with these tensors on the meta device, or makes too large values."""
        kind = torch.int64 if note.tokens else torch.float32
        values: list[Any] = [torch.zeros(1, *note.input_shape, dtype=kind, device="meta")]
        bare = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        try:
            for node in self._nodes:
                arguments = [_filled(argument, values, bare) for argument in node.arguments]
                options = {name: _filled(value, values, bare) for name, value in node.options.items()}
                options |= {"device": "meta"} if _makes(node.function) else {}
                values.append(node.function(*arguments, **options))
                _demand(_size_bytes(values[-1]) <= _MOST_BYTES, "one of its values is larger than 1 GiB per sample")
            shape = tuple(values[self._output].shape)
        except Exception as error:  # torch raises exceptions of many types
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BundleError(f"the bundle's network does not run: {reason}") from None
        if shape != (1, *note.output_shape):
            raise BundleError(f"the bundle's network returns {shape[1:]} per sample; its note says {note.output_shape}")

    def _node(self, node: Sequence[Any], place: int, done: list[int]) -> _Node:
        number, arguments, *more = node
        _demand(type(number) is int and 0 <= number < len(self._functions), f"operation {number} is not listed")
        _demand(all(0 <= value <= place for value in _values(node[1:])), "a value is used before it is computed")
        options = {str(name): _plain(value) for name, value in (more[0] if more else {}).items()}
        return _Node(self._functions[number], [_plain(argument) for argument in arguments], options, tuple(done))


@dataclass(frozen=True)
class _Value:
    number: int


@dataclass(frozen=True)
class _Parameter:
    number: int


def _plain(written: Any) -> Any:
    """The argument that was written: "#3" is a value, "$3" a tensor, "@x" a constant, "=x" a text."""
    if isinstance(written, list):
        return [_plain(item) for item in written]
    if not isinstance(written, str):
        _demand(written is None or isinstance(written, bool | int | float), f"{written!r} is not an argument")
        return written
    kind, rest = written[:1], written[1:]
    if kind == "#":
        return _Value(int(rest))
    if kind == "$":
        return _Parameter(int(rest))
    if kind == "@":
        _demand(rest in _CONSTANTS, f"'{rest}' is not a constant")
        return _CONSTANTS[rest]
    _demand(kind == "=", f"'{written}' is not an argument")
    return rest


def _filled(argument: Any, values: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    if type(argument) is _Value:
        return values[argument.number]
    if type(argument) is _Parameter:
        return tensors[argument.number]
    if type(argument) is list:
        return [_filled(item, values, tensors) for item in argument]
    return argument


def _values(written: Any) -> Iterator[int]:
    """The numbers of the values in a written argument."""
    if isinstance(written, str) and written.startswith("#"):
        yield int(written[1:])
    for item in written if isinstance(written, list | tuple) else written.values() if isinstance(written, dict) else ():
        yield from _values(item)


def unrolled(graph: Mapping[str, Any]) -> list[Any]:
    """All operations of a program, with repeated ones written out.

    Args:
        graph: a program; its "repeat" is [how many first operations repeat, how often, how many tensors each time].

    >>> unrolled({"nodes": [[0, ["#0", "$0"]], [1, ["#1", "#2"]]], "repeat": [1, 2, 1]})
    [[0, ['#0', '$0']], [0, ['#0', '$1']], [1, ['#1', '#2']]]
    """
    nodes = list(graph["nodes"])
    length, count, tensors = graph.get("repeat", (0, 1, 0))
    whole = all(type(number) is int and number >= 0 for number in (length, count, tensors))
    fits = whole and length <= len(nodes) and max(length, 1) * count <= _MOST_NODES
    _demand(fits, f"it cannot repeat {length} operations {count} times")
    again = [shifted(node, i * length, i * tensors) for i in range(count) for node in nodes[:length]]
    return again + nodes[length:]


def shifted(written: Any, values: int, tensors: int) -> Any:
    """A written operation with later values (except the input) and later tensors.

    >>> shifted([2, ["#0", "#3", "$1"]], 10, 5)
    [2, ['#0', '#13', '$6']]
    """
    if isinstance(written, list):
        return [shifted(item, values, tensors) for item in written]
    if isinstance(written, dict):
        return {name: shifted(item, values, tensors) for name, item in written.items()}
    if not isinstance(written, str) or written == "#0" or written[:1] not in ("#", "$"):
        return written
    return f"{written[0]}{int(written[1:]) + (values if written[0] == '#' else tensors)}"


def _function(name: str) -> Callable[..., Any]:
    if name in _ON_NUMBERS:
        return _ON_NUMBERS[name]
    _, operation, overload = name.split(".")
    function: Callable[..., Any] = getattr(getattr(torch.ops.aten, operation), overload)
    return function


def _makes(function: Callable[..., Any]) -> bool:
    """Whether an operation creates a tensor without inputs, and so needs to be told the device."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return False
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return not takes and any(argument.name == "device" for argument in schema.arguments)


def _size_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_size_bytes(item) for item in value) if isinstance(value, list | tuple) else 0
