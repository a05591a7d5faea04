"""For devices: load a bundle, and switch its size and its robustness between two predictions.

    network = load("net.anysize", size="0.25")
    logits = network(x)                     # x as raw inputs, images in [0, 1]
    network.switch("1.0", robustness=0.3)
    logits = network(x)
    network.fit(inference_bytes=1e6)        # the largest size that needs no more

This file needs only PyTorch and safetensors, and nothing else from this package: it can be copied to a device alone.
`load(..., key=...)`, which checks a signature, also needs cryptography. Several threads may use one network.

A bundle is one safetensors file. Its tensors are stored once. Its header holds the seal: the format, checksums and a
signature. Its note, a JSON object in a compressed tensor, says for every size which tensors the network uses, and which
part of each, and lists the network's operations. Nothing in it is code: operations
are looked up in a fixed list, and before a network is built, it is tried on the meta device, where nothing is read or
allocated; what does not fit is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import statistics
import threading
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import safetensors
import torch
from torch import Tensor

FORMAT = "anysize-bundle-3"
_OLDER = ("anysize-bundle-1", "anysize-bundle-2")
"""Formats that are still read, whose note stands in the file's header; 2 came with weights in fewer bits."""

_MOST_NODES = 100_000
_MOST_BYTES = 1 << 30  # limit on one intermediate value, per sample

# Pure functions of their arguments: none draws random numbers, writes to its inputs, or reads outside its tensors.
_ALLOWED = """
__and__.Tensor __or__.Tensor _native_batch_norm_legit_no_training.default _softmax.default _log_softmax.default
_to_copy.default _unsafe_view.default abs.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default
adaptive_avg_pool3d.default _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default adaptive_max_pool1d.default
adaptive_max_pool2d.default add.Scalar add.Tensor addmm.default alias.default amax.default amin.default any.dim
arange.default arange.start arange.start_step argmax.default argmin.default avg_pool1d.default avg_pool2d.default
avg_pool3d.default baddbmm.default batch_norm.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
bmm.default cat.default ceil.default chunk.default clamp.default clamp_max.default clamp_min.default clone.default
concat.default constant_pad_nd.default contiguous.default conv1d.default conv1d.padding conv2d.default conv2d.padding
conv3d.default conv3d.padding conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input
convolution.default cos.default cumsum.default detach.default div.Scalar div.Tensor div.Tensor_mode dropout.default
einsum.default elu.default embedding.default eq.Scalar eq.Tensor erf.default exp.default expand.default
expand_as.default expm1.default flatten.using_ints flip.default floor.default floor_divide.default full.default
full_like.default gather.default ge.Scalar ge.Tensor gelu.default glu.default group_norm.default gru.input gt.Scalar
gt.Tensor hardsigmoid.default hardswish.default hardtanh.default index.Tensor index_select.default
instance_norm.default layer_norm.default le.Scalar le.Tensor leaky_relu.default lift_fresh_copy.default
linalg_vector_norm.default linear.default log.default log_softmax.int log_sigmoid.default _trilinear.default
logical_and.default logical_not.default logical_or.default logsumexp.default lstm.input lt.Scalar lt.Tensor
masked_fill.Scalar matmul.default max.dim max.other max_pool1d.default max_pool2d.default
max_pool2d_with_indices.default max_pool3d.default maximum.default mean.default mean.dim min.dim min.other
minimum.default mish.default mm.default mul.Scalar mul.Tensor narrow.int native_group_norm.default
native_layer_norm.default ne.Scalar ne.Tensor neg.default new_zeros.default new_ones.default new_full.default
ones.default ones_like.default pad.default permute.default pixel_shuffle.default pixel_unshuffle.default pow.Scalar
pow.Tensor_Scalar pow.Tensor_Tensor prelu.default prod.dim_int reciprocal.default relu.default relu6.default
repeat.default repeat_interleave.self_int reshape.default rms_norm.default rnn_relu.input rnn_tanh.input roll.default
round.default rsqrt.default rsub.Scalar scalar_tensor.default scaled_dot_product_attention.default select.int
selu.default sigmoid.default sign.default silu.default sin.default slice.Tensor softmax.int softplus.default
split.Tensor split_with_sizes.default sqrt.default square.default squeeze.default squeeze.dim squeeze.dims
stack.default std.correction sub.Scalar sub.Tensor sum.default sum.dim_IntList t.default tanh.default tile.default
to.dtype transpose.int tril.default triu.default type_as.default unbind.int unflatten.int unsqueeze.default
upsample_bilinear2d.vec upsample_nearest2d.vec var.correction var_mean.correction view.default where.ScalarOther
where.ScalarSelf where.self zeros.default zeros_like.default
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

_KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load(
    path: str | Path,
    size: str | None = None,
    robustness: float | None = None,
    *,
    verify: bool = True,
    key: str | Path | None = None,
    cache: int = 16,
) -> Network:
    """The network in a bundle, by default at its largest size and its default robustness.

    Args:
        path: a file that `anysize customize --bundle` wrote.
        size: the label of one of its sizes.
        robustness: between 0 (accurate) and 1 (robust), for bundles of robust networks.
        verify: read the whole file once and compare its checksum; False reads no more than the size needs.
        key: a file with the public key (ed25519, PEM) of whoever may write bundles for this device; a bundle that this
            key did not sign is refused.
        cache: how many networks stay in memory, each a size at a level of robustness; the one used longest ago is
            freed first.
    """
    file = _File(Path(path), (FORMAT, *_OLDER))
    if verify or key is not None:
        file.verify(_finite, key)
    return Network(_Source(file), file.checked(), cache).switch(size, robustness)


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


# Word for word the same in runtime.py and in onnx_runtime.py, so that each can be copied alone ------

NOTE = "anysize"
SMALL = "small"
"""The name of the tensor that holds all small ones in a row, since each would need an entry in the file's header."""

PACKED = "note"
"""The name of the tensor that holds the note and, after a line feed, the graphs if they are ONNX's, compressed."""

MASK = "mask/"
"""How the names of the tensors begin that may hold minus infinity: attention masks, which nobody trains."""

UNSIGNED = "0" * 128
"""What stands in place of the signature while a file is signed."""

_PIECE = 1 << 20
_LONGEST_HEADER = 100_000_000
_LONGEST_NOTE = 1 << 26  # bytes, with the graphs, as they are when nothing is compressed
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_SIGNED_FOR = b"anysize bundle\0"  # a signature of this key for another purpose is none of a bundle

Recipe = int | list[Any] | dict[str, Any]
"""How to make a network's tensor: the number of a stored tensor, which is negative for a small one; [number, parts of
its axes, divisor]; or {"product": [coefficients, basis]}."""


class BundleError(Exception):
    """A bundle is damaged, was not written by anysize, or cannot do what was asked."""


@dataclass(frozen=True)
class Choice:
    """One network of a bundle, and what is known of it.

    Attributes:
        size: the label of its size.
        robustness: its level of robustness; None if there is no choice.
        costs: parameters, macs (multiply-adds of one sample), inference_bytes (its tensors in memory) and, if somebody
            measured it, latency_ms.
        metrics: what the task's metrics were on the test set, of this very file; empty if there was none.
        float32: the same before the weights were stored in fewer bits; empty if they were not.
    """

    size: str
    robustness: float | None
    costs: Mapping[str, float]
    metrics: Mapping[str, float]
    float32: Mapping[str, float]


class Switching(ABC):
    """The networks of a bundle, of which one is in use: what is known of them, and which one fits."""

    def __init__(self, note: _Note) -> None:
        self._note = note
        self._lock = threading.RLock()
        self._measured: dict[str, float] = {}

    def __repr__(self) -> str:
        robustness = "" if self.robustness is None else f"at robustness {self.robustness:g} "
        return f"<Network, size {self.size} {robustness}in use; it has {', '.join(self.sizes)}>"

    @abstractmethod
    def switch(self, size: str | None = None, robustness: float | None = None) -> Self:
        """This object, now using another size or robustness; None leaves either as it is."""

    @abstractmethod
    def forget(self, size: str | None = None) -> None:
        """Free the memory of one size that is not in use, or of all of them."""

    @abstractmethod
    def _try(self) -> object:
        """The outputs for one sample of zeros."""

    @property
    @abstractmethod
    def size(self) -> str:
        """The size in use."""

    @property
    @abstractmethod
    def robustness(self) -> float | None:
        """The robustness in use; None if the bundle has no choice."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """The labels of its sizes, smallest first."""
        return self._note.sizes

    @property
    def levels(self) -> tuple[float, ...]:
        """The values that `robustness` may have; with two, also all between them; empty if there is no choice."""
        return tuple(self._note.networks[self.size].levels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample; of the first input if there are several."""
        return self._note.inputs[0].shape

    @property
    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of one sample of each input by name; empty if there is one without a name."""
        return {given.name: given.shape for given in self._note.inputs if given.name}

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, if the data had any."""
        return self._note.class_names

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts about the run, and the normalisation that the network applies to its inputs: mean and std, or None."""
        return self._note.about

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every size at every level of robustness, smallest first, with its costs and metrics."""
        return tuple(
            Choice(label, level, self._costs(label), *(dict(known[at]) if known else {} for known in layout.known))
            for label, layout in self._note.networks.items()
            for at, level in enumerate(layout.levels or [None])
        )

    def fit(self, *, robustness: float | None = None, **limits: float) -> Self:
        """This object, now using its largest size that is within every limit.

        Args:
            robustness: as in `switch`.
            **limits: parameters, macs, inference_bytes or latency_ms. Latencies are those that `measure` found here
                or else, if the file holds some, those of the machine that wrote it.
        """
        costs = {label: self._costs(label) for label in self.sizes}
        known = {unit for own in costs.values() for unit in own}
        wrong = [f"{unit} = {limit!r}" for unit, limit in limits.items() if not _number(limit) or limit <= 0]
        if wrong or not limits:
            raise BundleError(f"limits must be numbers above 0; given {', '.join(wrong) or 'none'}")
        if unknown := sorted(set(limits) - known):
            advice = "; measure() times every size on this device" if "latency_ms" in unknown else ""
            held = f"it knows {', '.join(sorted(known)) or 'no costs'}"
            raise BundleError(f"the bundle does not know {', '.join(unknown)} of its sizes; {held}{advice}")
        for label in reversed(self.sizes):
            if all(costs[label].get(unit, math.inf) <= limit for unit, limit in limits.items()):
                return self.switch(label, robustness)

        def over(label: str) -> float:
            return max(costs[label].get(unit, math.inf) / limit for unit, limit in limits.items())

        given = ", ".join(f"{unit} = {limit:g}" for unit, limit in limits.items())
        nearest = min(self.sizes, key=over)
        needed = ", ".join(f"{unit} = {costs[nearest].get(unit, math.inf):g}" for unit in limits)
        raise BundleError(f"no size fits {given}; the nearest is {nearest}, which needs {needed}")

    def measure(self, repeats: int = 20, sizes: Sequence[str] | None = None) -> dict[str, float]:
        """The milliseconds that each size takes for one sample on this device, the median of `repeats`; for `fit`.

        The size in use is the same afterwards, and no other stays in memory.
        """
        with self._lock:
            size, robustness = self.size, self.robustness
            for label in self.sizes if sizes is None else sizes:
                self.switch(label)
                times = [_seconds(self._try) for _ in range(repeats + 2)][2:]  # the first two warm up
                self._measured[label] = 1000 * statistics.median(times)
                self.switch(size, robustness).forget()
            return dict(self._measured)

    def _in_order(self, x: Any) -> list[tuple[Any, _Input]]:
        """Each input with what the note says of it."""
        wanted = self._note.inputs
        if not wanted[0].name:
            return [(x, wanted[0])]
        given = sorted(map(str, x)) if isinstance(x, Mapping) else [f"one {type(x).__name__}"]
        if given != sorted(one.name for one in wanted):
            names = ", ".join(one.name for one in wanted)
            raise BundleError(f"the network takes a mapping of {names}; given {', '.join(given)}")
        return [(x[one.name], one) for one in wanted]

    def _costs(self, label: str) -> dict[str, float]:
        own = {"latency_ms": self._measured[label]} if label in self._measured else {}
        return {**self._note.networks[label].costs, **own}

    def _asked(self, size: str | None, robustness: float | None) -> tuple[str, float | None]:
        """The size and the level to switch to; an error if the bundle has no such."""
        label = self.size if size is None else size
        if label not in self._note.networks:
            raise BundleError(f"there is no size '{label}' in the bundle; it has {', '.join(self.sizes)}")
        return label, _level(self._note.networks[label], self.robustness if robustness is None else robustness)


def _level(layout: _Layout, asked: float | None) -> float | None:
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


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def digest(seal: Mapping[str, Any], data: Iterator[bytes]) -> str:
    """The checksum of a bundle's seal (without the checksum itself and the signature) and its tensors' bytes."""
    plain = {key: value for key, value in seal.items() if key not in ("sha256", "signature")}
    total = hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
    for piece in data:
        total.update(piece)
    return total.hexdigest()


def header_digest(header: Mapping[str, Any]) -> str:
    """The checksum of what a file's header says of its tensors."""
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    return hashlib.sha256(json.dumps(tensors, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def signed_message(head: bytes, data: Iterator[bytes]) -> bytes:
    """What a bundle's signature signs: a hash of the whole file, with zeros in place of the signature.

    Args:
        head: the file up to its tensors, with zeros in place of the signature.
        data: the bytes of the tensors.
    """
    total = hashlib.sha256(head)
    for piece in data:
        total.update(piece)
    return _SIGNED_FOR + total.digest()


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
        costs: what it costs, by unit.
        known: the metrics of each level, now and before weights were stored in fewer bits; either may be empty.
    """

    graph: int
    tensors: list[Recipe]
    robust: dict[int, list[Recipe]]
    levels: list[float]
    mixes: bool
    default: float
    costs: dict[str, float]
    known: tuple[list[dict[str, float]], list[dict[str, float]]]


@dataclass(frozen=True)
class _Input:
    """One input: its name, empty if it is the only one; the shape of one sample; whether it holds integers."""

    name: str
    shape: tuple[int, ...]
    tokens: bool

    def check(self, shape: Sequence[int], kind: str, kinds: Sequence[str], samples: int) -> None:
        """Refuse an input of another shape or type, or with other numbers of samples than the first."""
        what = f"input {self.name}" if self.name else "inputs"
        has, are = ("has", "is") if self.name else ("have", "are")
        if len(shape) == 0 or tuple(shape[1:]) != self.shape or shape[0] != samples:
            count = str(samples) if shape and shape[0] != samples else "N"
            wanted = ", ".join([count, *map(str, self.shape)])
            raise BundleError(f"{what} {has} shape {tuple(shape)}; expected ({wanted}{',' * (not self.shape)})")
        if kind not in kinds:
            expected = "tokens as int64" if self.tokens else "float32, images in [0, 1]"
            raise BundleError(f"{what} {are} {kind}; expected {expected}")


@dataclass(frozen=True)
class _Note:
    """The contents of a bundle's note."""

    sizes: tuple[str, ...]
    networks: dict[str, _Layout]
    graphs: list[dict[str, Any]]
    inputs: tuple[_Input, ...]
    output_shape: tuple[int, ...]
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
        inputs=_read_inputs(note),
        output_shape=_shape(note["output_shape"]),
        class_names=None if names is None else tuple(str(name) for name in names),
        about=dict(note["about"]),
    )
    _demand(bool(networks), "it holds no network")
    _demand(len(networks) == len(note["networks"]), "two sizes have one label")
    _demand(all(0 <= layout.graph < len(read.graphs) for layout in networks.values()), "a size has no program")
    return read


def _read_inputs(note: Mapping[str, Any]) -> tuple[_Input, ...]:
    """The inputs that a note lists, or the one without a name."""
    if "inputs" not in note:
        return (_Input("", _sample(note["input_shape"]), note["tokens"] is True),)
    found = tuple(_Input(str(name), _sample(shape), tokens is True) for name, shape, tokens in note["inputs"])
    _demand(len({one.name for one in found} - {""}) == len(found) > 0, "its inputs have no names, or equal ones")
    return found


def _read_layout(entry: Mapping[str, Any]) -> _Layout:
    robust = entry.get("robust") or {"levels": [], "mixes": False, "tensors": {}, "default": 0.0}
    levels = [float(level) for level in robust["levels"]]
    tensors = list(entry["tensors"])
    others = {int(place): list(recipes) for place, recipes in robust["tensors"].items()}
    _demand(levels == sorted(set(levels)) and all(map(_number, levels)), "its levels of robustness are out of order")
    _demand(not robust["mixes"] or len(levels) == 2, "mixed robustness needs two ends")
    _demand(all(0 <= place < len(tensors) for place in others), "a robust tensor has no place")
    _demand(all(len(recipes) == len(levels) for recipes in others.values()), "a level of robustness lacks a tensor")
    graph, default = entry["graph"], float(robust["default"])
    _demand(type(graph) is int, "a program's number is not a number")
    _demand(not levels or default in levels, "its default robustness is none of its levels")
    known = ([_numbers(one) for one in entry.get(key, [])] for key in ("metrics", "float32"))
    metrics, before = known
    _demand(all(len(one) in (0, len(levels) or 1) for one in (metrics, before)), "a level of robustness lacks metrics")
    costs = _numbers(entry.get("costs", {}))
    return _Layout(graph, tensors, others, levels, bool(robust["mixes"]), default, costs, (metrics, before))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Named numbers, none of them missing or infinite."""
    _demand(all(map(_number, values.values())), f"{values} are not numbers")
    return {str(name): value for name, value in values.items()}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shape(values: Sequence[Any]) -> tuple[int, ...]:
    _demand(all(type(value) is int and value > 0 for value in values), f"{values} is not a shape")
    return tuple(values)


def _sample(values: Sequence[Any]) -> tuple[int, ...]:
    """The shape of one sample."""
    shape = _shape(values)
    _demand(math.prod(shape) <= _MOST_BYTES, f"{values!s:.60} is a shape of more than {_MOST_BYTES} entries")
    return shape


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


@dataclass(frozen=True)
class _Stored:
    """A tensor in the file: a whole one or, with an offset, a part of the tensor that holds the small ones.

    `scale` is the number of the tensor by whose entries the rows of 8-bit weights are multiplied.
    """

    key: str
    kind: str
    shape: tuple[int, ...]
    offset: int | None
    scale: int | None = None


class _File:
    """A bundle's file: what its header says, checked against its length, its note, and the graphs that follow it.

    It stays open, so that what is read later is what was checked, also if another file takes its place.

    Args:
        path: the file.
        formats: those that are read; in the first one the note is compressed.
    """

    def __init__(self, path: Path, formats: Sequence[str]) -> None:
        self.path = path
        try:
            self.opened = open(path, "rb")  # noqa: SIM115 - closed with this object
            weakref.finalize(self, self.opened.close)
            length = int.from_bytes(self.opened.read(8), "little")
            self.start = 8 + length
            size = os.fstat(self.opened.fileno()).st_size
            _demand(length <= min(_LONGEST_HEADER, size - 8), f"its header has {length} bytes")
            self._head = length.to_bytes(8, "little") + self.opened.read(length)
            header = json.loads(self._head[8:], object_pairs_hook=_once)
            self._header: dict[str, Any] = {key: header[key] for key in header if key != "__metadata__"}
            self._seal = _object((header.get("__metadata__") or {})[NOTE])
            if (form := self._seal.get("format")) not in formats:
                raise BundleError(f"{path} has format {form!r:.40}, and this runtime reads {', '.join(formats)}")
            self.places = _places(self._header, size - self.start)
            if self._seal["format"] == formats[0]:
                text, _, self.graphs = self._opened(PACKED).partition(b"\n")
                self._note = _object(text)
            else:
                self._note, self.graphs = self._seal, self._opened("graphs") if "graphs" in self._header else b""
            self.stored = self._listed()
        except FileNotFoundError:
            raise BundleError(f"{path} does not exist") from None
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror or error}") from None
        except KeyError as error:
            raise BundleError(f"{path} is not an anysize bundle: it has no {error}") from None
        except (ValueError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, zlib.error) as error:
            raise BundleError(f"{path} is damaged or not an anysize bundle ({error})") from None

    def _opened(self, key: str) -> bytes:
        """The bytes that a tensor holds compressed."""
        begin, end = self._header[key]["data_offsets"]
        self.opened.seek(self.start + begin)
        opener = zlib.decompressobj()
        opened = opener.decompress(self.opened.read(end - begin), _LONGEST_NOTE)
        _demand(opener.eof and not opener.unused_data, f"'{key}' is not whole, or too long")
        return opened

    def _listed(self) -> dict[int, _Stored]:
        """Every stored tensor by its number: whole ones from 0 upwards, small ones from -1 downwards."""
        scales = {int(number): scale for number, scale in self._note.get("scales", {}).items()}
        found: dict[int, _Stored] = {}
        for number, key in enumerate(self._note["whole"]):
            about = self._header[key]
            found[number] = _Stored(key, about["dtype"], tuple(about["shape"]), None, scales.get(number))
        offset = 0
        for number, shape in enumerate(self._note["small"], start=1):
            found[-number] = _Stored(SMALL, "F32", _shape(shape), offset)
            offset += math.prod(shape)
        held = self._header[SMALL]["shape"] if offset else [0]
        _demand(held == [offset], f"its small tensors have {offset} entries, and {held} are there")
        _demand(not offset or self._header[SMALL]["dtype"] == "F32", "its small tensors are not float32")
        for number, scale in scales.items():
            rows = found[number].shape[:1]
            scaled = found[number].kind == "I8" and scale in found and scale < 0 and found[scale].shape == rows
            _demand(scaled, f"the scale of tensor {number} does not fit it")
        return found

    def verify(self, finite: Callable[[str, bytes, bool], bool], key: str | Path | None = None) -> None:
        """Refuse a file whose checksum or signature is wrong, or that holds numbers which are not finite.

        Args:
            finite: whether all numbers of that kind in these bytes are finite, or minus infinity if they are a mask's.
            key: the file with the public key that must have signed the bundle; None to trust any.
        """
        if key is not None:
            self._check_signature(Path(key))
        if digest(self._seal, self._pieces(finite)) != self._seal.get("sha256"):
            raise BundleError(f"{self.path} is damaged: its checksum is not the one that it was written with")
        if self._seal.get("header") not in (None, header_digest(self._header)):
            raise BundleError(f"{self.path} is damaged: its tensors are not the ones that it was written with")

    def _check_signature(self, key: Path) -> None:
        signature, head = self._seal.get("signature"), self._head
        if not isinstance(signature, str):
            raise BundleError(f"{self.path} is not signed; this device accepts only bundles signed for {key}")
        raw = signature.encode(errors="replace")
        once = len(raw) == len(UNSIGNED) and head.count(raw) == 1 and set(signature) <= set("0123456789abcdef")
        message = signed_message(head.replace(raw, UNSIGNED.encode()) if once else b"", self._pieces())
        if not once or not _signs(key, bytes.fromhex(signature), message):
            raise BundleError(f"{self.path} was changed, or signed with another key than {key}: its signature is wrong")

    def _pieces(self, finite: Callable[[str, bytes, bool], bool] | None = None) -> Iterator[bytes]:
        """The bytes of all tensors in order, each tensor in pieces of whole numbers."""
        try:
            self.opened.seek(self.start)
            for key, length in self.places.values():
                yield from self._pieces_of(key, length, self.opened, finite)
        except OSError as error:
            raise BundleError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def _pieces_of(
        self, key: str, length: int, file: BinaryIO, finite: Callable[[str, bytes, bool], bool] | None
    ) -> Iterator[bytes]:
        """The next tensor of the file; an error at a piece whose numbers are not finite, if that is asked for."""
        for begin in range(0, length, _PIECE):
            piece = file.read(min(_PIECE, length - begin))
            if finite is not None and not finite(self._header[key]["dtype"], piece, key.startswith(MASK)):
                raise BundleError(f"{self.path} is damaged: '{key}' has numbers that are not finite")
            yield piece

    def checked(self) -> _Note:
        """The checked note."""
        with self.blamed():
            return _read_note(self._note)

    def blamed(self) -> _Blamed:
        """Turn any error inside into an error about this file."""
        return _Blamed(self.path)


def _places(header: Mapping[str, Any], length: int) -> dict[int, tuple[str, int]]:
    """By where it begins, each tensor's name and length; an error unless the tensors fill the file without gaps."""
    found: dict[int, tuple[str, int]] = {}
    for key, about in header.items():
        begin, end = about["data_offsets"]
        shape = about["shape"]
        _demand(len(about) == 3, f"'{key}' has more than a type, a shape and a place")
        _demand(all(type(n) is int and n >= 0 for n in (begin, end, *shape)), f"'{key}' has a place that is none")
        needed = math.prod(shape) * _ITEM_BYTES[about["dtype"]]
        _demand(end - begin == needed, f"'{key}' does not have as many bytes as its shape needs")
        if needed:
            _demand(begin not in found, f"'{key}' lies on another tensor")
            found[begin] = (key, needed)
    end = 0
    for begin in sorted(found):
        _demand(begin == end, "its tensors do not follow each other")
        end += found[begin][1]
    _demand(end == length, f"tensors of {end} bytes in {length}")
    return dict(sorted(found.items()))


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which every key comes once: readers differ in which of two they believe."""
    _demand(len(dict(pairs)) == len(pairs), "a key comes twice")
    return dict(pairs)


def _object(text: str | bytes) -> dict[str, Any]:
    """An object of JSON."""
    found = json.loads(text, parse_constant=_constant, object_pairs_hook=_once)
    _demand(isinstance(found, dict), "its note is not an object")
    return dict(found)


def _constant(name: str) -> float:
    """The number that JSON has no word for: masks add minus infinity, but nothing is NaN."""
    _demand(name != "NaN", "it holds NaN")
    return float(name)


def _signs(key: Path, signature: bytes, message: bytes) -> bool:
    """Whether the signature of the message was made with the private part of a key."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise BundleError("checking a signature needs cryptography, not installed: pip install cryptography") from None
    try:
        public = load_pem_public_key(key.read_bytes())
    except (OSError, ValueError) as error:
        raise BundleError(f"{key} cannot be read as a public key in PEM: {error}") from None
    if not isinstance(public, Ed25519PublicKey):
        raise BundleError(f"{key} is not an ed25519 key; bundles are signed with ed25519")
    try:
        public.verify(signature, message)
    except InvalidSignature:
        return False
    return True


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


def _asked_part(recipe: Any, stored: Mapping[int, _Stored]) -> tuple[int, list[Any], float | None]:
    """Of a recipe that is no product: the stored tensor's number, the part of each of its axes, and the divisor."""
    number, axes, divisor = (recipe, [], None) if isinstance(recipe, int) else (*recipe, None)[:3]
    _demand(type(number) is int and number in stored, f"tensor {number} is not stored")
    shape = stored[number].shape
    asked = [*axes, *[None] * (len(shape) - len(axes))]
    _demand(len(asked) == len(shape), f"tensor {number} has no axis {len(asked) - 1}")
    _demand(divisor is None or (_number(divisor) and divisor > 0), f"{divisor} is not a divisor")
    return number, asked, divisor


def _end(part: Any, size: int) -> int:
    """How many entries of an axis, from the first on, cover a part: null (all), a count or runs [start, count]."""
    if part is None:
        return size
    runs = part if isinstance(part, list) else [[0, part]]
    fits = all(len(run) == 2 for run in runs) and all(type(n) is int and n >= 0 for run in runs for n in run)
    _demand(bool(runs) and fits, f"{part} is not a part of an axis")
    end = max(start + count for start, count in runs)
    _demand(0 < end <= size and sum(count for _, count in runs) <= size, f"{part} is not a part of an axis of {size}")
    return int(end)


def _rows(part: list[Any]) -> list[int]:
    """The entries that runs [start, count] name."""
    return [row for start, count in part for row in range(start, start + count)]


# Until here -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loaded:
    """A size in memory: its tensors in the order of its program's inputs, and those that change with robustness."""

    tensors: list[Tensor]
    levels: _Levels | None


@dataclass(frozen=True)
class _InUse:
    """What a call needs, in one object, so that a switch in another thread cannot come between two parts of it."""

    size: str
    robustness: float | None
    program: _Program
    tensors: list[Tensor]
    device: torch.device


class Network(Switching):
    """A bundle's networks; one of them is in use. Networks used before stay in memory, within the cache's limit."""

    def __init__(self, source: _Source, note: _Note, cache: int = 16) -> None:
        if cache < 1:
            raise BundleError(f"cache = {cache}: the network in use needs a place; give at least 1")
        super().__init__(note)
        self._source = source
        self._cache = cache
        self._graphs: dict[int, _Program] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._ready: dict[tuple[str, float | None], _InUse] = {}  # the one used last at the end
        self._in_use: _InUse | None = None

    @property
    def size(self) -> str:
        """The size in use."""
        return self._note.sizes[-1] if self._in_use is None else self._in_use.size

    @property
    def robustness(self) -> float | None:
        """The robustness in use; None if the bundle has no choice."""
        return None if self._in_use is None else self._in_use.robustness

    @property
    def device(self) -> torch.device:
        """Where the network computes."""
        return self._source.device

    def switch(self, size: str | None = None, robustness: float | None = None) -> Self:
        """This object, now using another size or robustness; None leaves either as it is."""
        with self._lock:
            asked = self._asked(size, robustness)
            ready = self._ready.pop(asked, None) or self._assembled(*asked)
            self._ready[asked] = self._in_use = ready
            if len(self._ready) > self._cache:
                self._keep(list(self._ready)[-self._cache :])
        return self

    def forget(self, size: str | None = None) -> None:
        """Free the memory of one size that is not in use, or of every network but the one in use; reads nothing."""
        with self._lock:
            if size is not None and (size == self.size or size not in self.sizes):
                what = "is in use; switch to another first" if size == self.size else "is not in the bundle"
                raise BundleError(f"size '{size}' {what}")
            used = (self.size, self.robustness)
            self._keep([key for key in self._ready if key == used or (size is not None and key[0] != size)])

    def to(self, device: torch.device | str) -> Self:
        """This object, with its tensors on another device, where inputs are then moved to as well."""
        with self._lock:
            self._source.move(torch.device(device))
            self._rebuild()
        return self

    def __call__(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """The outputs for a batch of raw inputs of shape `(N, *input_shape)`; of several inputs, a mapping by name."""
        used = self._in_use
        assert used is not None
        given = self._in_order(x)
        for tensor, about in given:
            kinds = _INTEGERS if about.tokens else (torch.float32,)
            about.check(tensor.shape, str(tensor.dtype), list(map(str, kinds)), len(given[0][0]) if tensor.dim() else 0)
        try:
            with torch.inference_mode():
                return used.program.run([tensor.to(used.device) for tensor, _ in given], used.tensors)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            raise BundleError(f"the network does not run on these inputs: {_first_line(error)}") from error

    def predict(self, x: Tensor | Mapping[str, Tensor]) -> list[str]:
        """The name of the likeliest class of each sample, or its number if classes have no names."""
        outputs = self(x)
        if outputs.dim() != 2:
            raise BundleError(f"outputs have shape {tuple(outputs.shape)}; predict needs outputs (N, classes)")
        names = self.class_names
        if names is not None and len(names) != outputs.shape[1]:
            raise BundleError(f"the bundle names {len(names)} classes; its network has {outputs.shape[1]}")
        return [str(i) if names is None else names[i] for i in outputs.argmax(1).tolist()]

    def _try(self) -> Tensor:
        blank = {one.name: _blank(one) for one in self._note.inputs}
        return self(blank if self.inputs else blank[""]).cpu()  # an accelerator is done when it is here

    def _assembled(self, label: str, level: float | None) -> _InUse:
        """A network at a level, its tensors in the order of its program's inputs."""
        layout = self._note.networks[label]
        program = self._program(layout.graph)
        with torch.inference_mode():
            if label not in self._loaded:
                self._loaded[label] = self._built(layout, program)
            loaded = self._loaded[label]
            tensors = list(loaded.tensors)
            if level is not None and loaded.levels is not None:
                for place, tensor in zip(layout.robust, loaded.levels.at(level, layout)):
                    tensors[place] = tensor
        return _InUse(label, level, program, tensors, self.device)

    def _program(self, number: int) -> _Program:
        if number not in self._graphs:
            with self._source.file.blamed():
                self._graphs[number] = _Program(self._note.graphs[number])
        return self._graphs[number]

    def _built(self, layout: _Layout, program: _Program) -> _Loaded:
        """A size's tensors, read after its program ran on the meta device with tensors of their shapes."""
        with self._source.file.blamed():
            bare = [self._source.outline(recipe) for recipe in layout.tensors]
            for place, recipes in layout.robust.items():
                _check_robust(bare[place], [self._source.outline(recipe) for recipe in recipes])
        program.trial(self._note, bare)
        with self._source.file.blamed():
            tensors = [self._source.make(recipe) for recipe in layout.tensors]
            return _Loaded(tensors, self._source.levels(layout) if layout.levels else None)

    def _keep(self, keys: Sequence[tuple[str, float | None]]) -> None:
        """Free every network but these, and what of the stored tensors only the others use."""
        gone = {label for label, _ in self._ready} - {label for label, _ in keys}
        self._ready = {key: self._ready[key] for key in keys}
        if gone:
            kept = {label for label, _ in keys}
            self._source.shrink(recipe for label in kept for recipe in _recipes(self._note.networks[label]))
            self._rebuild()

    def _rebuild(self) -> None:
        """Assemble every network in memory again, from the stored tensors in memory."""
        self._loaded.clear()
        self._ready = {key: self._assembled(*key) for key in self._ready}
        self._in_use = self._ready[self.size, self.robustness]


def _recipes(layout: _Layout) -> Iterator[Recipe]:
    """All recipes of a size, at every level."""
    yield from layout.tensors
    for recipes in layout.robust.values():
        yield from recipes


def _check_robust(plain: Tensor, others: Sequence[Tensor]) -> None:
    for tensor in others:
        same = tensor.shape == plain.shape
        _demand(same, f"a robust tensor has shape {tuple(tensor.shape)}, not {tuple(plain.shape)}")
        _demand(tensor.dtype == torch.float32, f"a robust tensor is {tensor.dtype}, not float32")


# The tensors --------------------------------------------------------------------------------------


class _Source:
    """Reads only the parts of the file's tensors that are needed, each once."""

    def __init__(self, file: _File) -> None:
        self.file = file
        self.device = torch.device("cpu")
        self._read: dict[int, Tensor] = {}
        try:
            opener: Any = safetensors.safe_open
            self._open = opener(file.path, "pt")
            if not os.path.samestat(os.fstat(file.opened.fileno()), os.stat(file.path)):
                raise BundleError(f"{file.path} was replaced while it was read; load it again")
        except (safetensors.SafetensorError, OSError) as error:
            raise BundleError(f"{file.path} is damaged or not an anysize bundle ({error})") from None

    def make(self, recipe: Recipe) -> Tensor:
        """The tensor of a recipe; if possible, a view of a tensor that is already in memory."""
        if isinstance(recipe, dict):
            coefficients, basis = (self.make(part) for part in recipe["product"])
            return _checked_finite(_composed(coefficients, basis), "a product")
        number, asked, divisor = _asked_part(recipe, self.file.stored)
        tensor = self._part(number, asked)
        return tensor if divisor is None else _checked_finite(tensor / divisor, "a quotient")

    def outline(self, recipe: Recipe) -> Tensor:
        """A tensor of a recipe's shape and type on the meta device; reads and allocates nothing."""
        if isinstance(recipe, dict):
            coefficients, basis = (self.outline(part) for part in recipe["product"])
            made = _composed(coefficients, basis)
            _demand(_size_bytes(made) <= _MOST_BYTES, "one of its tensors is larger than 1 GiB")
            return made
        number, asked, _ = _asked_part(recipe, self.file.stored)
        stored = self.file.stored[number]
        ends = [_end(part, size) for part, size in zip(asked, stored.shape)]
        counts = [len(_rows(part)) if isinstance(part, list) else end for part, end in zip(asked, ends)]
        return torch.empty(counts, dtype=_in_memory(stored), device="meta")

    def levels(self, layout: _Layout) -> _Levels:
        """The tensors that differ between levels of robustness, at each level."""
        made = [
            [self.make(recipes[level]) for recipes in layout.robust.values()] for level in range(len(layout.levels))
        ]
        rows = [torch.cat([t.reshape(-1) for t in own] or [torch.empty(0, device=self.device)]) for own in made]
        return _Levels(rows, [tensor.shape for tensor in made[0]])

    def move(self, device: torch.device) -> None:
        """Hold what was read on another device."""
        self._read = {number: tensor.to(device) for number, tensor in self._read.items()}
        self.device = device

    def shrink(self, recipes: Iterator[Recipe]) -> None:
        """Drop what was read, except the parts that these recipes need; larger tensors are copied in part."""
        needed: dict[int, list[int]] = {}
        for recipe in recipes:
            for number, ends in self._needs(recipe):
                needed[number] = list(map(max, needed.get(number, ends), ends))
        self._read = {
            number: _first(self._read[number], ends) for number, ends in needed.items() if number in self._read
        }

    def _needs(self, recipe: Recipe) -> Iterator[tuple[int, list[int]]]:
        """The stored tensors of a recipe, and how many entries of each axis it needs."""
        if isinstance(recipe, dict):
            for part in recipe["product"]:
                yield from self._needs(part)
            return
        number, asked, _ = _asked_part(recipe, self.file.stored)
        yield number, [_end(part, size) for part, size in zip(asked, self.file.stored[number].shape)]

    def _part(self, number: int, asked: Sequence[Any]) -> Tensor:
        """A part of a stored tensor."""
        ends = [_end(part, size) for part, size in zip(asked, self.file.stored[number].shape)]
        known = self._read.get(number)
        if known is None or any(have < need for have, need in zip(known.shape, ends)):
            known = self._read[number] = self._decoded(number, ends)
        for axis, (part, end) in enumerate(zip(asked, ends)):
            if isinstance(part, list):
                known = known.index_select(axis, torch.tensor(_rows(part), device=self.device))
            elif known.shape[axis] != end:
                known = known.narrow(axis, 0, end)
        return known

    def _decoded(self, number: int, ends: Sequence[int]) -> Tensor:
        """The first entries of a stored tensor along each axis, as the network uses them."""
        stored = self.file.stored[number]
        tensor = self._fetch(stored, ends).to(_in_memory(stored))
        if stored.scale is not None:
            scale = self._fetch(self.file.stored[stored.scale], ends[:1])
            tensor *= scale.reshape(-1, *[1] * (tensor.dim() - 1))
        return _checked_finite(tensor, f"'{stored.key}'", stored.key.startswith(MASK)).to(self.device)

    def _fetch(self, stored: _Stored, ends: Sequence[int]) -> Tensor:
        """The first entries of a stored tensor along each axis, as they are in the file."""
        lazy = self._open.get_slice(stored.key)
        if stored.offset is None:
            part: Tensor = lazy[tuple(slice(0, end) for end in ends)] if ends else self._open.get_tensor(stored.key)
            return part.contiguous()
        row = math.prod(stored.shape[1:])
        flat: Tensor = lazy[stored.offset : stored.offset + (row * ends[0] if ends else 1)]
        whole = flat.reshape(ends[0], *stored.shape[1:]) if ends else flat.reshape(())
        return whole[tuple(slice(0, end) for end in ends)].clone()


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


def _in_memory(stored: _Stored) -> torch.dtype:
    """The type in which a network holds a tensor: weights stored in fewer bits become float32."""
    return torch.float32 if stored.scale is not None or stored.kind in ("F16", "BF16") else _KINDS[stored.kind]


def _finite(kind: str, piece: bytes, mask: bool) -> bool:
    """Whether all numbers of that kind in these bytes are finite; a mask's may be minus infinity."""
    dtype = _KINDS[kind]
    return not dtype.is_floating_point or _is_finite(torch.frombuffer(bytearray(piece), dtype=dtype), mask)


def _checked_finite(tensor: Tensor, what: str, mask: bool = False) -> Tensor:
    finite = not tensor.is_floating_point() or tensor.is_meta or _is_finite(tensor, mask)
    _demand(finite, f"{what} has numbers that are not finite")
    return tensor


def _is_finite(tensor: Tensor, mask: bool) -> bool:
    return bool((tensor.isfinite() | tensor.isneginf() if mask else tensor.isfinite()).all())


def _first(tensor: Tensor, ends: Sequence[int]) -> Tensor:
    """The first entries along each axis; a copy unless that is all of them."""
    if list(tensor.shape) == list(ends):
        return tensor
    return tensor[tuple(slice(0, end) for end in ends)].clone()


def _composed(coefficients: Tensor, basis: Tensor) -> Tensor:
    """The weight (T, S, *k) that coefficients (T, S / R1, R2) make of a basis (R2, R1, *k)."""
    outputs, fragments, size = coefficients.shape
    flat = coefficients.reshape(outputs * fragments, size) @ basis.reshape(size, -1)
    return flat.reshape(outputs, fragments * basis.shape[1], *basis.shape[2:])


# The program --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """One operation: its function, its arguments as written, and which values no later operation needs.

    `makes`: whether it creates a tensor without inputs, and so needs to be told the device.
    """

    function: Callable[..., Any]
    arguments: list[Any]
    options: dict[str, Any]
    done: tuple[int, ...]
    makes: bool

    def called(self, values: Sequence[Any], tensors: Sequence[Tensor], device: torch.device) -> Any:
        """Its result."""
        arguments = [_filled(argument, values, tensors) for argument in self.arguments]
        options = {name: _filled(value, values, tensors) for name, value in self.options.items()}
        if self.makes:
            options["device"] = device
        return self.function(*arguments, **options)


def _blank(about: _Input, device: str = "cpu") -> Tensor:
    """One sample of an input: a text of tokens 0 that no mask hides, or zeros."""
    ones = about.tokens and about.name.endswith("mask")
    return torch.full((1, *about.shape), int(ones), dtype=torch.int64 if about.tokens else torch.float32, device=device)


class _Program:
    """A network's operations in order. Value 0 is the input, or all inputs in a row; each operation makes the next."""

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

    def run(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """The output for the inputs."""
        values: list[Any] = [inputs[0] if len(inputs) == 1 else inputs, *[None] * len(self._nodes)]
        for place, node in enumerate(self._nodes):
            values[place + 1] = node.called(values, tensors, inputs[0].device)
            for value in node.done:
                values[value] = None
        output: Tensor = values[self._output]
        return output

    def trial(self, note: _Note, bare: Sequence[Tensor]) -> None:
        """Refuse a program that does not run with these tensors on the meta device, or makes too large values."""
        inputs = [_blank(one, "meta") for one in note.inputs]
        values: list[Any] = [inputs[0] if len(inputs) == 1 else inputs]
        try:
            for node in self._nodes:
                values.append(node.called(values, bare, inputs[0].device))
                _demand(_size_bytes(values[-1]) <= _MOST_BYTES, "one of its values is larger than 1 GiB per sample")
            output = values[self._output]
            shape = tuple(output.shape)
        except Exception as error:  # torch raises exceptions of many types
            raise BundleError(f"the bundle's network does not run: {_first_line(error)}") from None
        if shape != (1, *note.output_shape):
            raise BundleError(f"the bundle's network returns {shape[1:]} per sample; its note says {note.output_shape}")

    def _node(self, node: Sequence[Any], place: int, done: list[int]) -> _Node:
        number, arguments, *more = node
        _demand(type(number) is int and 0 <= number < len(self._functions), f"operation {number} is not listed")
        _demand(all(0 <= value <= place for value in _values(node[1:])), "a value is used before it is computed")
        options = {str(name): _plain(value) for name, value in (more[0] if more else {}).items()}
        function = self._functions[number]
        return _Node(function, [_plain(argument) for argument in arguments], options, tuple(done), _makes(function))


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
    """Whether an operation creates a tensor without inputs, on a device that it is told."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        return False
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    return not takes and any(argument.name == "device" for argument in schema.arguments)


def _size_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_size_bytes(item) for item in value) if isinstance(value, list | tuple) else 0


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
