"""One file for a device: every size of a run, with the tensors that sizes share stored once.

`anysize.runtime` reads it. A smaller network's tensor that is a part of the largest one's, a base network that several
ensembles contain, a basis that composes several widths: each is stored once, and the file's note says how to make a
size's tensors from the stored ones. The networks' structure is a list of torch's own operations, as `torch.export`
traces it.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, fx, nn

from anysize import runtime
from anysize.atomic import replaced
from anysize.elastic.axes import Axes
from anysize.elastic.slicing import take
from anysize.errors import ModelError
from anysize.experiment.signature import Signature
from anysize.exports.formats import Exported, check_path, sample_inputs, silenced, traced
from anysize.runtime import Recipe
from anysize.wire import Json, Tensors

ENDING = ".anysize"

_TOLERANCE = 1e-4
_SMALL = 16_384  # entries; a larger tensor's entry in the file's header adds less than a fifth of a percent
_ON_NUMBERS: Mapping[Any, str] = {
    operator.getitem: "getitem",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floordiv",
    operator.neg: "neg",
    torch.ops.aten.sym_size.int: "size",
}
_CONSTANT = (
    "A network whose outputs depend on the number of samples in the batch cannot be bundled; len(x) in a model's code "
    "makes that number a constant, x.shape[0] does not"
)
_PLACES = ("device", "pin_memory", "layout")  # where a tensor is stored: always in ordinary memory on this device


@dataclass(frozen=True)
class Entry:
    """One size of a bundle.

    Attributes:
        label: the size's label.
        width: the size's width.
        networks: the finished network at every level of robustness; under None if there is no choice.
        mixes: whether every level between the two given is a mixture of them, tensor by tensor.
        products: weights that are stored as (coefficients, basis), by name; see `elastic.basis.compose`.
    """

    label: str
    width: float
    networks: Mapping[float | None, nn.Module]
    mixes: bool = False
    products: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def write_bundle(
    entries: Sequence[Entry], path: str | Path, signature: Signature, axes: Axes, about: Json | None = None
) -> Exported:
    """Write the sizes as one file, and check the file against the networks.

    Args:
        entries: the sizes, smallest first.
        path: a path that ends in .anysize.
        signature: shapes and types of the inputs.
        axes: the axes of the full network, which say where a smaller network's tensors are in a larger one's.
        about: facts to store with the tensors.
    """
    path = Path(path)
    check_path(path, [ENDING])
    inputs = sample_inputs(signature, 3)
    content = packed(entries, inputs, signature, axes, about or {}, path)
    try:
        with replaced(path) as new:
            new.write_bytes(content)
            difference = max(_differences(entries, new, inputs))
            if not difference <= _TOLERANCE:
                raise ModelError(
                    f"{path}: the written file's outputs differ from the networks' by {difference:g}. {_CONSTANT}"
                )
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror or error}") from None
    except runtime.BundleError as error:
        raise ModelError(f"{path}: the written file cannot be read back: {error}. {_CONSTANT}") from None
    return Exported(path, path.stat().st_size, difference)


def packed(
    entries: Sequence[Entry], inputs: Tensor, signature: Signature, axes: Axes, about: Json, path: Path
) -> bytes:
    """The bundle as bytes; the same networks give the same bytes."""
    store = _Store()
    programs: list[Json] = []
    networks: list[Json] = []
    largest: _Largest | None = None
    for entry in reversed(entries):
        first = next(iter(entry.networks.values()))
        with traced("torch.export", path), warnings.catch_warnings(), silenced("torch.export"):
            warnings.simplefilter("ignore")
            program, names, constants = traced_program(first, inputs)
        if program not in programs:
            programs.append(program)
        tensors = {level: _tensors(network, names, constants) for level, network in entry.networks.items()}
        note = _layout(entry, names, tensors, store, axes, largest)
        networks.insert(0, note | {"graph": programs.index(program)})
        largest = largest or _Largest(entry.width, next(iter(tensors.values())), dict(store.numbers))
    with torch.no_grad():
        output = next(iter(entries[-1].networks.values()))(inputs)
    note = {
        "format": runtime.FORMAT,
        "about": about | {"mean": signature.mean, "std": signature.std},
        "input_shape": list(signature.input_shape),
        "output_shape": list(output.shape[1:]),
        "tokens": signature.tokens,
        "class_names": list(signature.class_names) if signature.class_names else None,
        "graphs": programs,
        "networks": networks,
        "whole": list(store.whole),
        "small": [list(tensor.shape) for tensor in store.small],
    }
    held = dict(store.whole)
    if store.small:
        held[runtime.SMALL] = torch.cat([tensor.reshape(-1) for tensor in store.small])
    note = json.loads(json.dumps(note))
    plain = safetensors.torch.save(held)
    note["sha256"] = runtime.digest(note, iter([plain[8 + int.from_bytes(plain[:8], "little") :]]))
    return safetensors.torch.save(held, {runtime.NOTE: json.dumps(note, sort_keys=True, separators=(",", ":"))})


def traced_program(network: nn.Module, inputs: Tensor) -> tuple[Json, list[str], Tensors]:
    """The network's operations, the names of the tensors that they use, in order, and the constants among these."""
    shapes = ({0: torch.export.Dim.AUTO},)  # reading the file back shows whether the batch size became a constant
    exported = torch.export.export(network, (inputs,), dynamic_shapes=shapes)
    # Keep operations few and large; decompose only those that torch.export leaves in place of others.
    forms: list[Callable[[], Any]] = [
        lambda: exported,
        lambda: exported.run_decompositions({}),
        exported.run_decompositions,
    ]
    for form in forms:
        program = form()
        written = _Written(program)
        if not written.foreign:
            break
    if written.foreign:
        raise ModelError(f"it uses {', '.join(sorted(written.foreign))}, which a bundle cannot hold")
    return written.graph, written.names, {name: t for name, t in program.constants.items() if isinstance(t, Tensor)}


class _Written:
    """An exported program as JSON: each operation by its number in a list, with its arguments."""

    def __init__(self, program: Any) -> None:
        signature = program.graph_signature
        self._inputs: dict[str, str] = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        self._written: dict[str, str] = {}
        self._operations: list[str] = []
        self.names: list[str] = []
        self.foreign: set[str] = set()
        nodes: list[Any] = []
        (output,) = (node for node in program.graph.nodes if node.op == "output")
        needed = _needed(output)
        (result,) = output.args[0]
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name not in self._inputs:
                self._written[node.name] = "#0"
            elif node.op == "call_function" and node in needed:
                nodes.append(self._node(node))
                self._written[node.name] = f"#{len(nodes)}"
        last = self._argument(result)
        if not last.startswith("#"):
            self.foreign.add("an output that is not computed")
        self.graph = rolled({"operations": self._operations, "nodes": nodes, "output": int(last[1:])})

    def _node(self, node: fx.Node) -> list[Any]:
        name = _ON_NUMBERS.get(node.target, str(node.target))
        if not runtime.known_operation(name):
            self.foreign.add(name)
        if name not in self._operations:
            self._operations.append(name)
        options = {
            key: self._argument(value) for key, value in node.kwargs.items() if key not in _PLACES and value is not None
        }
        written = [self._operations.index(name), [self._argument(argument) for argument in node.args]]
        return [*written, options] if options else written

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._reference(value)
        if isinstance(value, list | tuple):
            return [self._argument(item) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return f"={value}"
        constant = runtime.constant_name(value)
        if constant is None:
            self.foreign.add(str(value))
        return f"@{constant}"

    def _reference(self, node: fx.Node) -> str:
        if node.name in self._written:
            return self._written[node.name]
        if node.name not in self._inputs:
            self.foreign.add(f"{node.op} {node.target}")
            return "#0"
        self.names.append(self._inputs[node.name])
        self._written[node.name] = f"${len(self.names) - 1}"
        return self._written[node.name]


def rolled(graph: Json) -> Json:
    """The program with repeated operations, such as those of an ensemble's networks, written once.

    >>> rolled({"nodes": [[0, ["#0", "$0"]], [0, ["#0", "$1"]], [1, ["#1", "#2"]]]})
    {'nodes': [[0, ['#0', '$0']], [1, ['#1', '#2']]], 'repeat': [1, 2, 1]}
    """
    nodes = graph["nodes"]
    found = [(length, *_repeated(nodes, length)) for length in range(1, len(nodes) // 2 + 1)]
    length, count, tensors = max(found, key=lambda one: one[0] * (one[1] - 1), default=(0, 1, 0))
    if count == 1:
        return graph
    return graph | {"nodes": nodes[:length] + nodes[count * length :], "repeat": [length, count, tensors]}


def _repeated(nodes: Sequence[Any], length: int) -> tuple[int, int]:
    """How often the first `length` operations repeat, each time with other tensors, and how many tensors each time."""
    tensors, count = _highest(nodes[:length]) + 1, 1
    while (count + 1) * length <= len(nodes) and all(
        nodes[count * length + i] == runtime.shifted(nodes[i], count * length, count * tensors) for i in range(length)
    ):
        count += 1
    return count, tensors


def _highest(written: Any) -> int:
    """The highest number of a tensor among written arguments; -1 if there is none."""
    if isinstance(written, str):
        return int(written[1:]) if written.startswith("$") else -1
    items = written.values() if isinstance(written, dict) else written if isinstance(written, list) else ()
    return max((_highest(item) for item in items), default=-1)


def _needed(output: fx.Node) -> set[fx.Node]:
    """The nodes that an output depends on."""
    found: set[fx.Node] = set()
    open_ = [output]
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            open_ += node.all_input_nodes
    return found


def _tensors(network: nn.Module, names: Sequence[str], constants: Tensors) -> Tensors:
    """The network's tensors of these names."""
    own: Tensors = {**dict(network.named_parameters(remove_duplicate=False))}
    own |= dict(network.named_buffers(remove_duplicate=False))
    return {name: (own[name] if name in own else constants[name]).detach().contiguous() for name in names}


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
        if tensor.numel() < _SMALL and tensor.dtype == torch.float32 and tensor.numel() > 0:
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

    default, *others = tensors.values()
    changing = {
        place: [recipe(name, own[name]) for own in tensors.values()]
        for place, name in enumerate(names)
        if any(not torch.equal(own[name], default[name]) for own in others)
    }
    made = [changing[i][0] if i in changing else recipe(name, default[name]) for i, name in enumerate(names)]
    note: Json = {"size": entry.label, "width": entry.width, "tensors": made}
    levels = [level for level in tensors if level is not None]
    if levels:
        robust = {str(place): recipes for place, recipes in changing.items()}
        note["robust"] = {"levels": levels, "mixes": entry.mixes, "default": levels[0], "tensors": robust}
    return note


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


def _differences(entries: Sequence[Entry], path: Path, inputs: Tensor) -> Iterator[float]:
    """For each size, the largest difference between the network's outputs and the bundle's, relative to the outputs."""
    for entry in entries:
        read = runtime.load(path, entry.label)
        for level, network in entry.networks.items():
            with torch.no_grad():
                expected = network(inputs)
            read.switch(entry.label, level)
            # Also one sample at a time: a batch size that became a constant would show here.
            for outputs in (read(inputs), torch.cat([read(inputs[i : i + 1]) for i in range(len(inputs))])):
                off = (outputs - expected).abs().max() if outputs.shape == expected.shape else math.inf
                yield float(off) / max(1.0, float(expected.abs().max()))
