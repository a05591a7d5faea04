"""One file for a device without PyTorch: every size of a run as ONNX graphs over shared tensors.

`anysize.onnx_runtime` reads it; `packing` says how the tensors are stored. A graph holds no weights, only the names t0,
t1, ... of the tensors that it gets; several inputs are x0, x1, ... in it. Where a method mixes robustness, the graph
has the input "robustness", and mixes a tensor t3 that changes with it from l3, its numbers at the low end, and h3,
those at the high end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anysize.elastic.axes import Axes
from anysize.elastic.skeleton import named_tensors
from anysize.errors import ModelError
from anysize.experiment.signature import Signature
from anysize.exports.formats import Exported, onnx_needs, onnx_program, silenced, traced
from anysize.exports.packing import PLAIN, Entry, Extras, Form, Reader, changing, write
from anysize.inputs import Input, Inputs
from anysize.runtime import BundleError
from anysize.wire import Json, Tensors

_INLINE = 64  # entries; a larger constant is stored with the tensors
_FOLDED = 4_096  # entries; a larger value is computed rather than stored


def write_onnx_bundle(
    entries: Sequence[Entry],
    path: str | Path,
    signature: Signature,
    axes: Axes,
    about: Json | None = None,
    extras: Extras = PLAIN,
) -> Exported:
    """Write the sizes as one file for `anysize.onnx_runtime`; as `bundle.write_bundle`, checked in the same way."""
    if (missing := onnx_needs()) is not None:
        raise ModelError(missing)
    return write(entries, Path(path), signature, axes, about or {}, extras, _Onnx())


class _Onnx(Form):
    """ONNX graphs, read by `anysize.onnx_runtime`."""

    format = "anysize-onnx-3"

    def traced(self, entry: Entry, inputs: Input, path: Path) -> tuple[bytes, list[str], Tensors]:
        first = next(iter(entry.networks.values()))
        model = onnx_program(first, inputs, path, optimize=False).model_proto
        if model.functions:
            import onnx.inliner

            model = onnx.inliner.inline_local_functions(model)
        own = {name for name, _ in named_tensors(first)}
        with traced("ONNX", path), silenced("onnxscript"):
            model = _simple(model, own)
        held = {i.name: i for i in model.graph.initializer if i.name in own or np.prod(i.dims) > _INLINE}
        constants = {name: _constant(tensor) for name, tensor in held.items() if name not in own}
        names = list(held)
        mixed = changing(entry, names, constants) if entry.mixes else []
        return _bare(model, names, mixed), names, constants

    def graphs(self, programs: Sequence[bytes]) -> tuple[list[Json], bytes]:
        return [{"bytes": len(program)} for program in programs], b"".join(programs)

    def read(self, path: Path) -> Reader:
        return _Read(path)


class _Read(Reader):
    def __init__(self, path: Path) -> None:
        from anysize import onnx_runtime

        with _one_kind():
            self._network = onnx_runtime.load(path, threads=1)

    def switch(self, size: str, robustness: float | None) -> None:
        with _one_kind():
            self._network.switch(size, robustness)

    def outputs(self, x: Input) -> Tensor:
        given = {name: t.numpy() for name, t in x.items()} if isinstance(x, Inputs) else x.numpy()
        with _one_kind():
            return torch.from_numpy(self._network(given))

    def latencies(self) -> Mapping[str, float]:
        with _one_kind():
            return self._network.measure()


@contextmanager
def _one_kind() -> Iterator[None]:
    """Turn an error of the device's file, which has its own, into that of `anysize.runtime`."""
    from anysize import onnx_runtime

    try:
        yield
    except onnx_runtime.BundleError as error:
        raise BundleError(str(error)) from None


def _simple(model: Any, own: Collection[str]) -> Any:
    """The model with fewer operations, none of which was changed for the numbers of a weight.

    Args:
        model: ONNX's.
        own: the names of the network's tensors; meanwhile each is an input, of which only the shape is known.
    """
    import onnxscript.optimizer
    from onnx import helper

    weights = {i.name: i for i in model.graph.initializer if i.name in own}
    others = [i for i in model.graph.initializer if i.name not in own]
    del model.graph.initializer[:]
    model.graph.initializer.extend(others)
    model.graph.input.extend(helper.make_tensor_value_info(i.name, i.data_type, i.dims) for i in weights.values())
    made = onnxscript.optimizer.optimize(model, output_size_limit=_FOLDED)
    inputs = [given for given in made.graph.input if given.name not in weights]
    used = {name for node in made.graph.node for name in node.input}
    del made.graph.input[:]
    made.graph.input.extend(inputs)
    made.graph.initializer.extend(weights[name] for name in weights if name in used)
    _drop_defaults(made)
    return made


def _drop_defaults(model: Any) -> None:
    """Drop every attribute that says what ONNX assumes without it."""
    from onnx import defs

    versions = {opset.domain: opset.version for opset in model.opset_import}
    for node in model.graph.node:
        known = defs.get_schema(node.op_type, versions[node.domain], node.domain).attributes
        told = [given for given in node.attribute if given != known[given.name].default_value]
        del node.attribute[:]
        node.attribute.extend(told)


def _constant(tensor: Any) -> Tensor:
    """A constant of the graph that is no parameter."""
    import onnx.numpy_helper

    return torch.from_numpy(np.array(onnx.numpy_helper.to_array(tensor)))


def _bare(model: Any, names: Sequence[str], mixed: Sequence[int]) -> bytes:
    """The model without the tensors of these names and without anything that is only for readers.

    Args:
        model: ONNX's.
        names: the tensors, t0, t1, ... from now on.
        mixed: the places of those that are mixed from two.
    """
    from onnx import TensorProto, ValueInfoProto, helper

    graph = model.graph
    short = {name: f"t{place}" for place, name in enumerate(names)}
    short |= {value: f"v{place}" for place, value in enumerate(value for node in graph.node for value in node.output)}
    several = len(graph.input) > 1  # then names that no tensor of the graph has
    short |= {value.name: f"x{place}" if several else "input" for place, value in enumerate(graph.input)}
    short |= {value.name: value.name for value in graph.output}
    short[""] = ""
    nodes = [_short(node, short) for node in graph.node]
    inputs: list[Any] = [ValueInfoProto(name=short[value.name], type=value.type) for value in graph.input]
    initial = []
    for place, tensor in enumerate(i for name in names for i in graph.initializer if i.name == name):
        ends = (f"l{place}", f"h{place}") if place in mixed else (f"t{place}",)
        initial += [_outside(tensor, name) for name in ends]
    initial += [i for i in graph.initializer if i.name not in names]
    first = []
    for place in mixed:
        low, high, between, step = (f"{kind}{place}" for kind in "lhds")
        first.append(helper.make_node("Sub", [high, low], [between]))
        first.append(helper.make_node("Mul", [between, "robustness"], [step]))
        first.append(helper.make_node("Add", [low, step], [f"t{place}"]))
    if mixed:
        inputs.append(helper.make_tensor_value_info("robustness", TensorProto.FLOAT, []))
    made = helper.make_graph([*first, *nodes], "network", inputs, list(graph.output), initial)
    bare = helper.make_model(made, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    data: bytes = bare.SerializeToString(deterministic=True)
    return data


def _short(node: Any, short: Mapping[str, str]) -> Any:
    """A node with other names for its values."""
    from onnx import NodeProto

    return NodeProto(
        op_type=node.op_type,
        domain=node.domain,
        input=[short.get(name, name) for name in node.input],
        output=[short[name] for name in node.output],
        attribute=node.attribute,
    )


def _outside(tensor: Any, name: str) -> Any:
    """A tensor of that shape and type whose numbers a session gets from outside."""
    from onnx import StringStringEntryProto, TensorProto

    place = StringStringEntryProto(key="location", value="t")  # a session does not look there
    kind = TensorProto.EXTERNAL
    return TensorProto(
        name=name, dims=tensor.dims, data_type=tensor.data_type, data_location=kind, external_data=[place]
    )
