"""For devices without PyTorch: load a bundle of ONNX graphs, and switch its size and its robustness.

    network = load("net.anysize", size="0.25")
    logits = network(x)                     # x a numpy array of raw inputs, images in [0, 1]
    network.switch("1.0", robustness=0.3)
    logits = network(x)
    network.fit(inference_bytes=1e6)        # the largest size that needs no more

This file needs only numpy and onnxruntime, and nothing else from this package: it can be copied to a device alone.
`load(..., key=...)`, which checks a signature, also needs cryptography. Several threads may use one network.

The file is in the safetensors format. Its tensors are stored once. Its header holds the seal: the format, checksums and
a signature. Its note, a JSON object, says for every size which tensors the network uses, and which part of each; it
stands compressed in a tensor, before the graphs. These, one for each size, hold no weights: they get them when a
session begins, and sizes with equal tensors share them. Where a method mixes robustness, it is an input of the graph.
"""

from __future__ import annotations

import hashlib
import json
import math
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

import numpy as np
import onnxruntime
from numpy.typing import NDArray

FORMAT = "anysize-onnx-3"
_OLDER = ("anysize-onnx-1", "anysize-onnx-2")
"""Formats that are still read, whose note stands in the file's header; 2 came with weights in fewer bits."""

_MOST_BYTES = 1 << 30  # limit on one tensor
_KINDS: Mapping[str, type[Any]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_RANDOM = frozenset(b"RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial".split())
_DOMAINS = (b"", b"ai.onnx")
Array = NDArray[Any]


def load(
    path: str | Path,
    size: str | None = None,
    robustness: float | None = None,
    *,
    verify: bool = True,
    key: str | Path | None = None,
    cache: int = 16,
    threads: int = 0,
) -> Network:
    """The network in a bundle, by default at its largest size and its default robustness.

    Args:
        path: a file that `anysize customize --bundle --runtime onnx` wrote.
        size: the label of one of its sizes.
        robustness: between 0 (accurate) and 1 (robust), for bundles of robust networks.
        verify: read the whole file once and compare its checksum; False reads no more than the size needs.
        key: a file with the public key (ed25519, PEM) of whoever may write bundles for this device; a bundle that this
            key did not sign is refused.
        cache: how many networks stay in memory; the one used longest ago is freed first.
        threads: with how many a network computes; 0 leaves that to onnxruntime.
    """
    file = _File(Path(path), (FORMAT, *_OLDER))
    if verify or key is not None:
        file.verify(_finite, key)
    return Network(_Source(file), file.checked(), cache, threads).switch(size, robustness)


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
class _Session:
    """A graph with its weights, which must live as long as it."""

    run: Any
    weights: Mapping[str, Any]


@dataclass(frozen=True)
class _InUse:
    """What a call needs, in one object, so that a switch in another thread cannot come between two parts of it."""

    size: str
    robustness: float | None
    session: _Session
    more: Mapping[str, Array]


class Network(Switching):
    """A bundle's networks; one of them is in use. Networks used before stay in memory, within the cache's limit."""

    def __init__(self, source: _Source, note: _Note, cache: int = 16, threads: int = 0) -> None:
        if cache < 1:
            raise BundleError(f"cache = {cache}: the network in use needs a place; give at least 1")
        super().__init__(note)
        self._source = source
        self._cache = cache
        self._threads = threads
        self._ready: dict[tuple[str, float | None], _Session] = {}  # the one used last at the end
        self._in_use: _InUse | None = None

    @property
    def size(self) -> str:
        """The size in use."""
        return self._note.sizes[-1] if self._in_use is None else self._in_use.size

    @property
    def robustness(self) -> float | None:
        """The robustness in use; None if the bundle has no choice."""
        return None if self._in_use is None else self._in_use.robustness

    def switch(self, size: str | None = None, robustness: float | None = None) -> Self:
        """This object, now using another size or robustness; None leaves either as it is."""
        with self._lock:
            label, level = self._asked(size, robustness)
            layout = self._note.networks[label]
            key = (label, None if layout.mixes else level)
            session = self._ready.pop(key, None) or self._begun(layout, level)
            self._ready[key] = session
            more: dict[str, Array] = {}
            if layout.mixes and level is not None:
                low, high = layout.levels
                more["robustness"] = np.asarray((level - low) / (high - low), np.float32)
            self._in_use = _InUse(label, level, session, more)
            self._ready = dict(list(self._ready.items())[-self._cache :])
            self._source.keep(self._ready.values())
        return self

    def forget(self, size: str | None = None) -> None:
        """Free the memory of one size that is not in use, or of every network but the one in use; reads nothing."""
        with self._lock:
            if size is not None and (size == self.size or size not in self.sizes):
                what = "is in use; switch to another first" if size == self.size else "is not in the bundle"
                raise BundleError(f"size '{size}' {what}")
            used = self._in_use
            self._ready = {
                key: session
                for key, session in self._ready.items()
                if (used is not None and session is used.session) or (size is not None and key[0] != size)
            }
            self._source.keep(self._ready.values())

    def __call__(self, x: Array | Mapping[str, Array]) -> Array:
        """The outputs for a batch of raw inputs of shape `(N, *input_shape)`; of several inputs, a mapping by name."""
        used = self._in_use
        assert used is not None
        given = self._in_order(x)
        for array, about in given:
            samples = len(given[0][0]) if array.ndim else 0
            about.check(array.shape, str(array.dtype), ["int64" if about.tokens else "float32"], samples)
        names = [f"x{place}" for place in range(len(given))] if len(given) > 1 else ["input"]
        try:
            asked = {name: array for name, (array, _) in zip(names, given)}
            outputs: Array = used.session.run(None, {**asked, **used.more})[0]
        except Exception as error:  # onnxruntime's exceptions have no common type
            raise BundleError(f"the network does not run on these inputs: {error}") from None
        if outputs.shape != (len(given[0][0]), *self._note.output_shape):
            raise BundleError(f"the network returns {outputs.shape[1:]}; its note says {self._note.output_shape}")
        return outputs

    def predict(self, x: Array | Mapping[str, Array]) -> list[str]:
        """The name of the likeliest class of each sample, or its number if classes have no names."""
        outputs = self(x)
        if outputs.ndim != 2:
            raise BundleError(f"outputs have shape {outputs.shape}; predict needs outputs (N, classes)")
        names = self.class_names
        if names is not None and len(names) != outputs.shape[1]:
            raise BundleError(f"the bundle names {len(names)} classes; its network has {outputs.shape[1]}")
        return [str(i) if names is None else names[i] for i in outputs.argmax(1).tolist()]

    def _try(self) -> Array:
        blank = {one.name: _blank(one) for one in self._note.inputs}
        return self(blank if self.inputs else blank[""])

    def _begun(self, layout: _Layout, level: float | None) -> _Session:
        """A session of a size; of a level too, unless the graph mixes them."""
        recipes = {f"t{place}": recipe for place, recipe in enumerate(layout.tensors)}
        for place, own in layout.robust.items():
            if layout.mixes:
                del recipes[f"t{place}"]
                recipes |= {f"l{place}": own[0], f"h{place}": own[1]}
            elif level is not None:
                recipes[f"t{place}"] = own[layout.levels.index(level)]
        with self._source.file.blamed():
            graph = self._source.graph(self._note.graphs, layout.graph)
            check_graph(graph, set(recipes))
            for recipe in recipes.values():
                self._source.shape(recipe)
            weights = {name: self._source.weight(recipe) for name, recipe in recipes.items()}
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = self._threads
        options.add_external_initializers(list(weights), list(weights.values()))
        try:
            session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no common type
            raise BundleError(f"the bundle's network does not run: {error}") from None
        return _Session(session.run, weights)


def _blank(about: _Input) -> Array:
    """One sample of an input: a text of tokens 0 that no mask hides, or zeros."""
    ones = about.tokens and about.name.endswith("mask")
    return np.full((1, *about.shape), int(ones), np.int64 if about.tokens else np.float32)


# The tensors --------------------------------------------------------------------------------------


class _Source:
    """Reads only the parts of the file's tensors that are needed, each once."""

    def __init__(self, file: _File) -> None:
        self.file = file
        self._weights: dict[str, Any] = {}
        self._begins = {key: begin for begin, (key, _) in file.places.items()}

    def graph(self, listed: Sequence[Mapping[str, Any]], number: int) -> bytes:
        """One of the graphs."""
        lengths = [graph["bytes"] for graph in listed]
        whole = all(type(length) is int and length > 0 for length in lengths)
        _demand(whole and len(self.file.graphs) == sum(lengths), "its graphs are not as long as it says")
        first = sum(lengths[:number])
        return self.file.graphs[first : first + lengths[number]]

    def weight(self, recipe: Recipe) -> Any:
        """The tensor of a recipe as onnxruntime's value; equal recipes give the same."""
        key = json.dumps(recipe, sort_keys=True)
        if key not in self._weights:
            made = np.ascontiguousarray(self._made(recipe))
            self._weights[key] = onnxruntime.OrtValue.ortvalue_from_numpy(made)
        return self._weights[key]

    def keep(self, sessions: Any) -> None:
        """Drop every weight that none of these sessions uses."""
        used = {id(weight) for session in sessions for weight in session.weights.values()}
        self._weights = {key: weight for key, weight in self._weights.items() if id(weight) in used}

    def shape(self, recipe: Recipe) -> tuple[int, ...]:
        """The shape of a recipe's tensor; an error if it does not fit together, before anything is read."""
        if isinstance(recipe, dict):
            (outputs, fragments, size), (rows, *more) = (self.shape(part) for part in recipe["product"])
            _demand(size == rows and len(more) > 0, "the factors of a product do not fit")
            made = (outputs, fragments * more[0], *more[1:])
            _demand(4 * math.prod(made) <= _MOST_BYTES, "one of its tensors is larger than 1 GiB")
            return made
        number, asked, _ = _asked_part(recipe, self.file.stored)
        ends = [_end(part, size) for part, size in zip(asked, self.file.stored[number].shape)]
        return tuple(len(_rows(part)) if isinstance(part, list) else end for part, end in zip(asked, ends))

    def _made(self, recipe: Recipe) -> Array:
        if isinstance(recipe, dict):
            coefficients, basis = (self._made(part) for part in recipe["product"])
            outputs, fragments, size = coefficients.shape
            flat = coefficients.reshape(outputs * fragments, size) @ basis.reshape(size, -1)
            return _checked_finite(flat.reshape(outputs, fragments * basis.shape[1], *basis.shape[2:]), "a product")
        number, asked, divisor = _asked_part(recipe, self.file.stored)
        stored = self.file.stored[number]
        part = self._part(number, asked)
        if stored.scale is not None:
            scale = self._part(stored.scale, asked[:1])
            part = part.astype(np.float32) * scale.reshape(-1, *[1] * (part.ndim - 1))
        elif stored.kind == "F16":
            part = part.astype(np.float32)
        part = part if divisor is None else part / np.asarray(divisor, part.dtype)
        return _checked_finite(part, f"'{stored.key}'", stored.key.startswith(MASK))

    def _part(self, number: int, asked: Sequence[Any]) -> Array:
        """A copy of a part of a stored tensor, as it is in the file."""
        stored = self.file.stored[number]
        kind = np.dtype(_KINDS[stored.kind])
        begin = self._begins[stored.key] + (stored.offset or 0) * kind.itemsize
        whole = self._bytes(begin, kind, stored.shape or (1,)).reshape(stored.shape)
        for axis, (part, size) in enumerate(zip(asked, stored.shape)):
            if isinstance(part, list):
                whole = np.take(whole, _rows(part), axis)
            else:
                whole = whole[(slice(None),) * axis + (slice(0, _end(part, size)),)]
        return np.array(whole, order="C")

    def _bytes(self, begin: int, kind: Any, shape: tuple[int, ...]) -> Array:
        """Numbers of the file, behind its header; only those that are used are read."""
        whole: Array = np.memmap(self.file.opened, kind, "r", self.file.start + begin, shape)
        return whole


def _finite(kind: str, piece: bytes, mask: bool) -> bool:
    """Whether all numbers of that kind in these bytes are finite; a mask's may be minus infinity."""
    return kind not in ("F64", "F32", "F16") or _is_finite(np.frombuffer(piece, _KINDS[kind]), mask)


def _checked_finite(array: Array, what: str, mask: bool = False) -> Array:
    finite = not np.issubdtype(array.dtype, np.floating) or _is_finite(array, mask)
    _demand(finite, f"{what} has numbers that are not finite")
    return array


def _is_finite(array: Array, mask: bool) -> bool:
    return bool((np.isfinite(array) | (mask & np.isneginf(array))).all())


# The graphs ---------------------------------------------------------------------------------------


def check_graph(model: bytes, given: set[str]) -> None:
    """Refuse an ONNX model that could do more than compute with the tensors that it is given.

    Its operations must be ONNX's own, none random, with no graphs or functions inside; no tensor may lie in a file.

    Args:
        model: as protobuf.
        given: the names of the tensors that a session gets from outside.
    """
    graphs = [value for number, value in _fields(model) if number == 7]
    _demand(all(number not in (20, 25) for number, _ in _fields(model)), "it holds functions")
    _demand(len(graphs) == 1 and isinstance(graphs[0], bytes), "it holds no graph")
    for number, value in _fields(graphs[0]):
        _demand(number != 15, "it holds sparse tensors")
        if number == 1:
            _check_node(value)
        if number == 5:
            name, outside = _tensor(value)
            _demand(outside == (name in given), f"tensor '{name}' lies outside")


def _check_node(node: bytes) -> None:
    for number, value in _fields(node):
        _demand(number != 7 or value in _DOMAINS, f"operations of {value!r} are not allowed")
        _demand(number != 4 or value not in _RANDOM, f"{value!r} is not allowed")
        if number == 5:
            _check_attribute(value)


def _check_attribute(attribute: bytes) -> None:
    for number, value in _fields(attribute):
        _demand(number not in (6, 11, 22, 23), "graphs and sparse tensors inside operations are not allowed")
        _demand(number not in (5, 10) or not _tensor(value)[1], "a constant lies outside")


def _tensor(tensor: bytes) -> tuple[str, bool]:
    """A tensor's name, and whether its numbers lie outside the graph."""
    found = list(_fields(tensor))
    names = [value.decode() for number, value in found if number == 8 and isinstance(value, bytes)]
    outside = any(number == 13 or (number == 14 and value != 0) for number, value in found)
    return (names or [""])[-1], outside


def _fields(message: Any) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: the number and the value of each."""
    _demand(isinstance(message, bytes), "a message is not one")
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        _demand(kind in (1, 2, 5), f"field of kind {kind}")
        length, at = _varint(message, at) if kind == 2 else (8 if kind == 1 else 4, at)
        _demand(at + length <= len(message), "a message ends before its last field")
        yield tag >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(the number of variable length at a place, the place after it)."""
    value = 0
    for count in range(10):
        _demand(at + count < len(message), "a message ends within a number")
        value |= (message[at + count] & 0x7F) << (7 * count)
        if message[at + count] < 0x80:
            return value, at + count + 1
    raise ValueError("a number is too long")
