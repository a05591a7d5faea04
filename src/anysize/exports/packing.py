"""Packing every size of a run into one file: tensors that sizes share are stored once.

A smaller network's tensor that is a part of the largest one's, a base network that several ensembles contain, a basis
that composes several widths: each is stored once, and the file's note says how to make a size's tensors from the stored
ones. `bundle` and `onnx_bundle` say how the networks' operations are written.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import safetensors.torch
import torch
from torch import Tensor, nn

from anysize import runtime
from anysize.atomic import replaced
from anysize.config.extras import needs
from anysize.elastic.axes import Axes
from anysize.elastic.slicing import take
from anysize.errors import ModelError, unknown
from anysize.experiment.signature import Signature
from anysize.exports.formats import Exported, check_path, sample_inputs
from anysize.inputs import Input, Inputs, named
from anysize.models import vocabulary
from anysize.runtime import Recipe
from anysize.wire import Json, Tensors

ENDING = ".anysize"
Precision = Literal["float32", "float16", "int8"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

_TOLERANCE = 1e-4
_SMALL = 16_384  # entries; a larger tensor's entry in the file's header adds less than a fifth of a percent
_WORTH_REDUCING = 1_024  # entries; below, an entry of its own in the header would cost about what fewer bits save
_CONSTANT = (
    "A network whose outputs depend on the number of samples in the batch cannot be bundled; len(x) in a model's code "
    "makes that number a constant, x.shape[0] does not"
)


@dataclass(frozen=True)
class Entry:
    """One size of a bundle.

    Attributes:
        label: the size's label.
        width: the size's width.
        networks: the finished network at every level of robustness; under None if there is no choice.
        mixes: whether every level between the two given is a mixture of them, tensor by tensor.
        products: weights that are stored as (coefficients, basis), by name; see `elastic.basis.compose`.
        costs: what the network costs, by unit.
    """

    label: str
    width: float
    networks: Mapping[float | None, nn.Module]
    mixes: bool = False
    products: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)


Judge = Callable[[Callable[[Input], Tensor]], Mapping[str, float]]
"""The task's metrics of a network on the test set."""


@dataclass(frozen=True)
class Extras:
    """What a bundle may hold or have besides the networks.

    Attributes:
        judge: measures the metrics that the file is to state; None if there is no test set.
        latency: whether the file is to state how long each size takes on this machine.
        precision: "float32", or the fewer bits in which large weights are stored: "float16" or "int8".
        key: the file with the private key (ed25519, PEM) that signs the bundle; None for no signature.
    """

    judge: Judge | None = None
    latency: bool = False
    precision: Precision = "float32"
    key: Path | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ModelError(unknown("precision", str(self.precision), PRECISIONS))


PLAIN = Extras()


class Reader(ABC):
    """A written bundle, read by the runtime that devices use."""

    @abstractmethod
    def switch(self, size: str, robustness: float | None) -> None:
        """Use another network."""

    @abstractmethod
    def outputs(self, x: Input) -> Tensor:
        """Of the network in use."""

    @abstractmethod
    def latencies(self) -> Mapping[str, float]:
        """The milliseconds of one sample by size."""


class Form(ABC):
    """How a bundle holds operations, and which runtime reads them."""

    format: str
    """The file's format."""

    @abstractmethod
    def traced(self, entry: Entry, inputs: Input, path: Path) -> tuple[Any, list[str], Tensors]:
        """A size's program, the names of the tensors that it uses, in order, and the constants among these."""

    @abstractmethod
    def graphs(self, programs: Sequence[Any]) -> tuple[list[Json], bytes]:
        """What the note says of the programs, and what follows the note."""

    @abstractmethod
    def read(self, path: Path) -> Reader:
        """The file as a device reads it."""


def write(
    entries: Sequence[Entry],
    path: Path,
    signature: Signature,
    axes: Axes,
    about: Json,
    extras: Extras,
    form: Form,
) -> Exported:
    """Write the sizes as one file, and check the file against the networks; see `bundle.write_bundle`."""
    check_path(path, [ENDING])
    private = None if extras.key is None else _private(extras.key)
    inputs = sample_inputs(signature, 3, vocabulary(next(iter(entries[-1].networks.values()))))
    packed = _packed(entries, inputs, signature, axes, about, path, form)
    try:
        with replaced(path) as new:
            new.write_bytes(sealed(packed))
            reader = form.read(new)
            difference = max(_differences(entries, reader, inputs))
            if not difference <= _TOLERANCE:
                raise ModelError(
                    f"{path}: the written file's outputs differ from the networks' by {difference:g}. {_CONSTANT}"
                )
            known = _metrics(entries, reader, extras.judge, signature)
            if extras.precision != "float32":
                packed = reduced(packed, extras.precision)
                new.write_bytes(sealed(packed))
                reader = form.read(new)
                difference = max(_differences(entries, reader, inputs))
                packed = packed.stating("float32", known)
                known = _metrics(entries, reader, extras.judge, signature)
            packed = packed.stating("metrics", known)
            if extras.latency:
                packed = packed.timed(reader.latencies())
            new.write_bytes(sealed(packed, private))
            form.read(new)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror or error}") from None
    except runtime.BundleError as error:
        raise ModelError(f"{path}: the written file cannot be read back: {error}. {_CONSTANT}") from None
    return Exported(path, path.stat().st_size, difference)


@dataclass(frozen=True)
class Packed:
    """A bundle before it is written.

    Attributes:
        format: the file's.
        note: what is said of the networks.
        whole: the large tensors by name.
        small: the others, which stand in one row later, in this order.
        graphs: what follows the note.
    """

    format: str
    note: Json
    whole: Tensors
    small: list[Tensor]
    graphs: bytes

    def stating(self, key: str, known: Sequence[Sequence[Mapping[str, float]]]) -> Packed:
        """The same with the metrics of every size, which may be none, in its note."""
        entries = [
            {**entry, key: [_finite(one) for one in own]} if own else entry
            for entry, own in zip(self.note["networks"], known)
        ]
        return replace(self, note={**self.note, "networks": entries})

    def timed(self, latencies: Mapping[str, float]) -> Packed:
        """The same with the time that each size takes in its note."""
        entries = [
            {**entry, "costs": {**entry.get("costs", {}), "latency_ms": latencies[entry["size"]]}}
            for entry in self.note["networks"]
        ]
        return replace(self, note={**self.note, "networks": entries})


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON can hold: the loss of a network that diverged is no number."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def sealed(packed: Packed, private: Any = None) -> bytes:
    """The bundle as bytes, with its checksums and, if a private key is given, its signature.

    The same networks and the same key give the same bytes.
    """
    note = json.dumps(packed.note, sort_keys=True, separators=(",", ":")).encode() + b"\n" + packed.graphs
    held = {**packed.whole, runtime.PACKED: torch.frombuffer(bytearray(zlib.compress(note, 9)), dtype=torch.uint8)}
    if packed.small:
        held[runtime.SMALL] = torch.cat([tensor.reshape(-1) for tensor in packed.small])
    plain = safetensors.torch.save(held)
    start = 8 + int.from_bytes(plain[:8], "little")
    seal = {"format": packed.format, "header": runtime.header_digest(json.loads(plain[8:start]))}
    if private is not None:
        seal["signature"] = runtime.UNSIGNED
    seal["sha256"] = runtime.digest(seal, iter([plain[start:]]))
    content = safetensors.torch.save(held, {runtime.NOTE: json.dumps(seal, sort_keys=True, separators=(",", ":"))})
    if private is None:
        return content
    start = 8 + int.from_bytes(content[:8], "little")
    signature: str = private.sign(runtime.signed_message(content[:start], iter([content[start:]]))).hex()
    mark = b'\\"signature\\":\\"'  # the seal is JSON within JSON
    before, after = content[:start].split(mark + runtime.UNSIGNED.encode())
    return before + mark + signature.encode() + after + content[start:]


def _private(key: Path) -> Any:
    """The private key in a file."""
    if (missing := needs("a signature", "fleet", "cryptography")) is not None:
        raise ModelError(missing)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{key} cannot be read as a private key in PEM without a password: {error}") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise ModelError(f"{key} is not an ed25519 key; make one: openssl genpkey -algorithm ed25519 -out {key}")
    return found


def _packed(
    entries: Sequence[Entry],
    inputs: Input,
    signature: Signature,
    axes: Axes,
    about: Json,
    path: Path,
    form: Form,
) -> Packed:
    """The networks and their tensors, all in float32."""
    store = _Store()
    programs: list[Any] = []
    networks: list[Json] = []
    largest: _Largest | None = None
    for entry in reversed(entries):
        program, names, constants = form.traced(entry, inputs, path)
        if program not in programs:
            programs.append(program)
        tensors = {level: _tensors(network, names, constants) for level, network in entry.networks.items()}
        for level, network in entry.networks.items():
            _refuse_infinite(entry.label, tensors[level], dict(network.named_parameters(remove_duplicate=False)))
        layout = _layout(entry, names, tensors, store, axes, largest)
        networks.insert(0, layout | {"graph": programs.index(program)})
        largest = largest or _Largest(entry.width, next(iter(tensors.values())), dict(store.numbers))
    with torch.no_grad():
        output = next(iter(entries[-1].networks.values()))(inputs)
    listed, graphs = form.graphs(programs)
    note = {
        "about": about | {"mean": signature.mean, "std": signature.std},
        "input_shape": list(signature.input_shape),
        "output_shape": list(output.shape[1:]),
        "tokens": signature.tokens,
        "class_names": list(signature.class_names) if signature.class_names else None,
        "graphs": listed,
        "networks": networks,
        "whole": list(store.whole),
        "small": [list(tensor.shape) for tensor in store.small],
    }
    if signature.inputs is not None:
        note["inputs"] = [[name, list(shape), integers] for name, shape, integers in signature.inputs]
    return Packed(form.format, note, store.whole, store.small, graphs)


def _tensors(network: nn.Module, names: Sequence[str], constants: Tensors) -> Tensors:
    """The network's tensors of these names."""
    own: Tensors = {**dict(network.named_parameters(remove_duplicate=False))}
    own |= dict(network.named_buffers(remove_duplicate=False))
    return {name: (own[name] if name in own else constants[name]).detach().contiguous() for name in names}


def _refuse_infinite(label: str, tensors: Tensors, trained: Mapping[str, object]) -> None:
    """Refuse numbers that are not finite, but for minus infinity in a mask that the architecture makes."""
    for name, tensor in tensors.items():
        fine = tensor.isfinite() if name in trained else tensor.isfinite() | tensor.isneginf()
        if tensor.is_floating_point() and not bool(fine.all()):
            raise ModelError(f"size {label} cannot be bundled: '{name}' has numbers that are not finite")


# Weights in fewer bits ------------------------------------------------------------------------------


def reduced(packed: Packed, precision: Precision) -> Packed:
    """The same bundle with its larger weights in 16 or 8 bits; the rest, biases and statistics among it, stays.

    Args:
        packed: the bundle in float32.
        precision: "float16", or "int8": each row of a weight divided by its largest entry / 127.
    """
    moved = {place: tensor for place, tensor in enumerate(packed.small) if _reducible(tensor)}
    stay = [place for place in range(len(packed.small)) if place not in moved]
    numbers = {-1 - old: -1 - new for new, old in enumerate(stay)}
    numbers |= {-1 - old: len(packed.whole) + new for new, old in enumerate(moved)}
    whole = {**packed.whole, **{f"small/{place}": tensor for place, tensor in moved.items()}}
    small = [packed.small[place] for place in stay]
    scales: dict[str, int] = {}
    for number, (key, tensor) in enumerate(whole.items()):
        if not _reducible(tensor):
            continue
        if precision == "float16":
            whole[key] = _halved(key, tensor)
            continue
        whole[key], scale = eight_bits(tensor)
        small.append(scale)
        scales[str(number)] = -len(small)
    networks = [_renumbered(entry, numbers) for entry in packed.note["networks"]]
    note = {**packed.note, "networks": networks, "whole": list(whole), "scales": scales}
    note["small"] = [list(tensor.shape) for tensor in small]
    note["about"] = {**note["about"], "precision": precision}
    return replace(packed, note=note, whole=whole, small=small)


def _reducible(tensor: Tensor) -> bool:
    large = tensor.dim() > 1 and tensor.numel() >= _WORTH_REDUCING
    return tensor.dtype == torch.float32 and large and not bool(tensor.isneginf().any())


def _halved(key: str, tensor: Tensor) -> Tensor:
    half = tensor.half()
    if not bool(half.isfinite().all()):
        raise ModelError(f"{key} has weights above 65,504, the largest of float16; use int8 or float32")
    return half


def eight_bits(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(integers from -127 to 127, the factor of each row of the first axis that gives the weights back).

    >>> eight_bits(torch.tensor([[254.0, -127.0], [0.0, 0.0]]))
    (tensor([[127, -64],
            [  0,   0]], dtype=torch.int8), tensor([2., 1.]))
    """
    largest = tensor.flatten(1).abs().amax(1)
    scale = torch.where(largest > 0, largest / 127, 1.0)
    return torch.round(tensor / scale.reshape(-1, *[1] * (tensor.dim() - 1))).to(torch.int8), scale


def _renumbered(entry: Json, numbers: Mapping[int, int]) -> Json:
    """A size's layout with other numbers for stored tensors."""

    def recipe(given: Any) -> Any:
        if isinstance(given, dict):
            return {"product": [recipe(part) for part in given["product"]]}
        return numbers.get(given, given) if isinstance(given, int) else [numbers.get(given[0], given[0]), *given[1:]]

    changed = {**entry, "tensors": [recipe(one) for one in entry["tensors"]]}
    if "robust" in entry:
        robust = {place: [recipe(one) for one in own] for place, own in entry["robust"]["tensors"].items()}
        changed["robust"] = {**entry["robust"], "tensors": robust}
    return changed


# What is stored -----------------------------------------------------------------------------------


class _Store:
    """Tensors to be stored, equal ones only once: large ones separately, small ones in a row."""

    def __init__(self) -> None:
        self.whole: Tensors = {}
        self.small: list[Tensor] = []
        self.numbers: dict[bytes, int] = {}

    def put(self, key: str, tensor: Tensor) -> int:
        """The tensor's number."""
        mark = fingerprint(tensor)
        if mark not in self.numbers:
            self.numbers[mark] = self._new(key, tensor)
        return self.numbers[mark]

    def _new(self, key: str, tensor: Tensor) -> int:
        if tensor.is_floating_point() and bool(tensor.isneginf().any()):
            key = runtime.MASK + key
        elif 0 < tensor.numel() < _SMALL and tensor.dtype == torch.float32:
            self.small.append(tensor)
            return -len(self.small)
        self.whole[key] = tensor.clone()
        return len(self.whole) - 1


def fingerprint(tensor: Tensor) -> bytes:
    """A hash that is equal for tensors of equal type, shape and bits, and for no others."""
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).digest()


@dataclass(frozen=True)
class _Largest:
    """The largest network's tensors, and the numbers under which they are stored."""

    width: float
    tensors: Tensors
    numbers: Mapping[bytes, int]


def _layout(
    entry: Entry,
    names: Sequence[str],
    tensors: Mapping[float | None, Tensors],
    store: _Store,
    axes: Axes,
    largest: _Largest | None,
) -> Json:
    """What the note says about one size."""

    def recipe(name: str, tensor: Tensor) -> Recipe:
        if name in entry.products:
            coefficients, basis = (part.detach().contiguous() for part in entry.products[name])
            numbers = [store.put(f"{entry.label}/{name}/u", coefficients), store.put(f"{name}/v", basis)]
            return {"product": numbers}
        part = _part_of(largest, axes, name, tensor, entry.width) if largest is not None else None
        return part if part is not None else store.put(f"{entry.label}/{name}", tensor)

    default = next(iter(tensors.values()))
    robust = {
        place: [recipe(names[place], own[names[place]]) for own in tensors.values()]
        for place in _changing(names, tensors)
    }
    made = [robust[i][0] if i in robust else recipe(name, default[name]) for i, name in enumerate(names)]
    note: Json = {"size": entry.label, "width": entry.width, "tensors": made}
    if entry.costs:
        note["costs"] = dict(entry.costs)
    levels = [level for level in tensors if level is not None]
    if levels:
        by_place = {str(place): recipes for place, recipes in robust.items()}
        note["robust"] = {"levels": levels, "mixes": entry.mixes, "default": levels[0], "tensors": by_place}
    return note


def changing(entry: Entry, names: Sequence[str], constants: Tensors) -> list[int]:
    """The places of those of the named tensors that differ between levels of robustness."""
    return _changing(names, {level: _tensors(one, names, constants) for level, one in entry.networks.items()})


def _changing(names: Sequence[str], tensors: Mapping[float | None, Tensors]) -> list[int]:
    default, *others = tensors.values()
    return [
        place for place, name in enumerate(names) if any(not torch.equal(own[name], default[name]) for own in others)
    ]


def _part_of(largest: _Largest, axes: Axes, name: str, tensor: Tensor, width: float) -> Recipe | None:
    """The recipe of `tensor` as a part, perhaps divided, of the largest network's tensor of that name; None if not."""
    full = largest.tensors.get(name)
    number = None if full is None else largest.numbers.get(fingerprint(full))
    if full is None or number is None or name not in axes.shapes or tensor.numel() == full.numel():
        return None
    within = axes.index(name, axes.kept(largest.width))
    places = [_place(part, whole) for part, whole in zip(axes.index(name, axes.kept(width)), within)]
    part = take(full, tuple(places))
    if part.shape != tensor.shape:
        return None
    runs = [None if place is None else _runs(place) for place in places]
    if torch.equal(part, tensor):
        return [number, runs]
    divisor = width / largest.width
    return [number, runs, divisor] if torch.allclose(part / divisor, tensor, rtol=1e-6, atol=0) else None


def _place(part: Tensor | None, whole: Tensor | None) -> Tensor | None:
    """The places of a smaller network's entries among a larger one's, given the places of both in the full network."""
    return part if part is None or whole is None else torch.searchsorted(whole, part)


def _runs(places: Tensor) -> int | list[list[int]]:
    """The places as runs [start, count], or as a count if they are the first ones.

    >>> _runs(torch.tensor([0, 1, 2])), _runs(torch.tensor([0, 1, 4, 5]))
    (3, [[0, 2], [4, 2]])
    """
    runs: list[list[int]] = []
    for place in places.tolist():
        if runs and place == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([place, 1])
    return runs[0][1] if len(runs) == 1 and runs[0][0] == 0 else runs


def _differences(entries: Sequence[Entry], reader: Reader, inputs: Input) -> Iterator[float]:
    """For each size, the largest difference between the network's outputs and the bundle's, relative to the outputs."""
    for entry in entries:
        for level, network in entry.networks.items():
            with torch.no_grad():
                expected = network(inputs)
            reader.switch(entry.label, level)
            # Also one sample at a time: a batch size that became a constant would show here.
            singly = torch.cat([reader.outputs(inputs[i : i + 1]) for i in range(len(inputs))])
            for outputs in (reader.outputs(inputs), singly):
                off = (outputs - expected).abs().max() if outputs.shape == expected.shape else math.inf
                yield float(off) / max(1.0, float(expected.abs().max()))


def _metrics(
    entries: Sequence[Entry], reader: Reader, judge: Judge | None, signature: Signature
) -> list[list[Mapping[str, float]]]:
    """For each size, the metrics at each level of robustness; none without a judge, or if texts do not fit."""
    found: list[list[Mapping[str, float]]] = []
    for entry in entries:
        found.append([])
        for level in entry.networks if judge is not None else ():
            reader.switch(entry.label, level)
            assert judge is not None
            try:
                found[-1].append(judge(lambda x: _outputs(reader, x, signature)))
            except _Unfit:
                return [[] for _ in entries]
    return found


class _Unfit(Exception):
    """A text is longer than those of a bundle, or shorter without a mask that could hide the rest."""


def _outputs(reader: Reader, x: Input, signature: Signature) -> Tensor:
    """The outputs for texts of any length up to that of the bundle: they are filled up, and the rest is cut off."""
    sizes = {name: shape for name, shape, _ in signature.inputs or ()}
    other = [name for name, tensor in named(x) if name in sizes and tuple(tensor.shape[1:]) != sizes[name]]
    if not isinstance(x, Inputs) or not other:
        return reader.outputs(x)
    hidden = any(name.endswith("mask") for name in other) or all(name.startswith("decoder") for name in other)
    if not hidden or any(x[name].dim() != 2 or x[name].shape[1] > sizes[name][0] for name in other):
        raise _Unfit
    more = {name: sizes[name][0] - x[name].shape[1] for name in other}
    outputs = reader.outputs(Inputs({name: nn.functional.pad(t, (0, more.get(name, 0))) for name, t in x.items()}))
    predicted = x["decoder_input_ids"] if "decoder_input_ids" in x else x.values()[0]
    return outputs[:, : predicted.shape[1]] if outputs.dim() > 2 else outputs
