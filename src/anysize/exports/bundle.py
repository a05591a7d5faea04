"""One file for a device with PyTorch: every size of a run, in the operations of torch itself.

`anysize.runtime` reads it. The networks' structure is a list of torch's own operations, as `torch.export` traces it;
`packing` says how their tensors are stored.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from anysize import runtime
from anysize.elastic.axes import Axes
from anysize.errors import ModelError
from anysize.experiment.signature import Signature
from anysize.exports.formats import Exported, dynamic, silenced, traced
from anysize.exports.packing import PLAIN, Entry, Extras, Form, Reader, write
from anysize.inputs import Input, Inputs, tensors_in
from anysize.wire import Json, Tensors

_ON_NUMBERS: Mapping[Any, str] = {
    operator.getitem: "getitem",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floordiv",
    operator.neg: "neg",
    torch.ops.aten.sym_size.int: "size",
}
_PLACES = ("device", "pin_memory", "layout")  # where a tensor is stored: always in ordinary memory on this device


def write_bundle(
    entries: Sequence[Entry],
    path: str | Path,
    signature: Signature,
    axes: Axes,
    about: Json | None = None,
    extras: Extras = PLAIN,
) -> Exported:
    """Write the sizes as one file, and check the file against the networks.

    Args:
        entries: the sizes, smallest first.
        path: a path that ends in .anysize.
        signature: shapes and types of the inputs.
        axes: the axes of the full network, which say where a smaller network's tensors are in a larger one's.
        about: facts to store with the tensors.
        extras: what else the file is to hold.
    """
    return write(entries, Path(path), signature, axes, about or {}, extras, _Torch())


class _Torch(Form):
    """Operations of torch, read by `anysize.runtime`."""

    format = runtime.FORMAT

    def traced(self, entry: Entry, inputs: Input, path: Path) -> tuple[Json, list[str], Tensors]:
        first = next(iter(entry.networks.values()))
        with traced("torch.export", path), warnings.catch_warnings(), silenced("torch.export"):
            warnings.simplefilter("ignore")
            return traced_program(first, inputs)

    def graphs(self, programs: Sequence[Json]) -> tuple[list[Json], bytes]:
        return list(programs), b""

    def read(self, path: Path) -> Reader:
        return _Read(runtime.load(path))


class _Read(Reader):
    def __init__(self, network: runtime.Network) -> None:
        self._network = network

    def switch(self, size: str, robustness: float | None) -> None:
        self._network.switch(size, robustness)

    def outputs(self, x: Input) -> Tensor:
        return self._network(dict(x.items()) if isinstance(x, Inputs) else x)

    def latencies(self) -> Mapping[str, float]:
        return self._network.measure()


def traced_program(network: nn.Module, inputs: Input) -> tuple[Json, list[str], Tensors]:
    """The network's operations, the names of the tensors that they use, in order, and the constants among these."""
    shapes = dynamic(network, inputs, batch=torch.export.Dim.AUTO)  # reading the file back shows whether it is constant
    exported = torch.export.export(network, tensors_in(inputs), dynamic_shapes=shapes)
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
        given = [node for node in program.graph.nodes if node.op == "placeholder" and node.name not in self._inputs]
        for place, node in enumerate(given):
            self._written[node.name] = "#0"  # the input or, if there are several, all of them in a row
            if len(given) > 1:
                nodes.append([self._number("getitem"), ["#0", place]])
                self._written[node.name] = f"#{len(nodes)}"
        for node in program.graph.nodes:
            if node.op == "call_function" and node in needed:
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
        options = {
            key: self._argument(value) for key, value in node.kwargs.items() if key not in _PLACES and value is not None
        }
        written = [self._number(name), [self._argument(argument) for argument in node.args]]
        return [*written, options] if options else written

    def _number(self, name: str) -> int:
        """An operation's place in the list of those that the program uses."""
        if name not in self._operations:
            self._operations.append(name)
        return self._operations.index(name)

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
