"""A bundle for devices without PyTorch: the same outputs, from numpy and onnxruntime alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
import torch
from onnx import TensorProto, helper
from torch import nn

import anysize as az
from anysize import onnx_runtime, runtime
from anysize.elastic.axes import trace
from anysize.errors import ModelError
from anysize.experiment.signature import Signature
from anysize.exports.onnx_bundle import write_onnx_bundle
from anysize.exports.packing import Entry
from anysize.methods import SplitMix
from anysize.onnx_runtime import BundleError, check_graph, load
from topologies import TOPOLOGIES

FIXTURE = Path(__file__).parent / "fixtures" / "bundles" / "heterofl-onnx.anysize"
X = (np.arange(2 * 64).reshape(2, 1, 8, 8) % 17 / 16).astype(np.float32)
RECORDED = json.loads((FIXTURE.parent / "outputs.json").read_text())["heterofl"]
METHODS: dict[str, Any] = {
    "heterofl": "heterofl",
    "flanc": "flanc",
    "splitmix, robustness to choose": SplitMix(dual_norm=True),
    "oat": {"name": "oat", "encoding": 8},
}


@pytest.mark.slow  # the fixture stands for them among the fast tests
@pytest.mark.parametrize("name", METHODS)
def test_both_runtimes_give_the_same_outputs_at_every_size_and_robustness(tmp_path: Path, name: str) -> None:
    run = az.Experiment(
        data="digits",
        clients=4,
        partition={"fraction": 0.1},
        model={"name": "resnet14", "options": {"channels": [4, 8, 8]}} if name == "heterofl" else "small-cnn",
        method=METHODS[name],
        devices={"capacities": [0.5, 1.0]},
        tricks={"batch_norm": "tracked", "adversarial": 0.5} if name.startswith("splitmix") else {},
        rounds=1,
        training={"local_steps": 2, "learning_rate": 0.05},
        engine={"name": "inprocess"},
    ).run(tmp_path / "run")
    torch_file = run.bundle(tmp_path / "torch.anysize").path
    onnx_file = run.bundle(tmp_path / "onnx.anysize", runtime="onnx").path
    plain, other = runtime.load(torch_file), load(onnx_file)
    assert (other.sizes, other.levels) == (plain.sizes, plain.levels)
    assert [c.costs for c in other.choices] == [c.costs for c in plain.choices]
    for mine, theirs in zip(other.choices, plain.choices):
        assert mine.metrics == pytest.approx(theirs.metrics, abs=1e-4)
    between = [*plain.levels, 0.3] if name.startswith("splitmix") else plain.levels or [None]
    for size in plain.sizes:
        for level in between:
            expected = plain.switch(size, level)(torch.from_numpy(X)).numpy()
            assert np.abs(other.switch(size, level)(X) - expected).max() < 1e-5
    sessions = len(other._ready)
    assert sessions == len(plain.sizes) * (1 if name.startswith("splitmix") else max(1, len(plain.levels)))
    header = json.loads(onnx_file.read_bytes()[8:][: int.from_bytes(onnx_file.read_bytes()[:8], "little")])
    tensors = sum(
        about["data_offsets"][1] - about["data_offsets"][0]
        for key, about in header.items()
        if key not in ("note", "__metadata__")
    )
    if name != "heterofl":  # a deep network of a few thousand parameters: its graph is larger than they are
        assert onnx_file.stat().st_size < 1.05 * tensors


class Tiny(nn.Module):
    """A network of 14 KB."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Conv2d(1, 8, 3, padding=1, bias=False)
            self.second = nn.Conv2d(8, 40, 3, stride=2, bias=False)
            self.norm, self.head = nn.BatchNorm2d(40), nn.Linear(40, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.first(x).relu())).relu().mean((2, 3)))


def test_a_tiny_networks_file_is_at_most_a_twentieth_larger_than_its_tensors(tmp_path: Path) -> None:
    """With the graph as the exporter gives it, and the note as text, it is 6.6 %."""
    levels: dict[float | None, nn.Module] = {0.0: Tiny(0).eval(), 1.0: Tiny(1).eval()}
    signature = Signature((1, 8, 8), False, (), True, 10, 10, None, None, None)
    axes = trace(Tiny(0), torch.zeros(2, 1, 8, 8))
    path = write_onnx_bundle([Entry("1.0", 1.0, levels, mixes=True)], tmp_path / "net.anysize", signature, axes).path
    stored = safetensors.numpy.load_file(path)
    tensors = sum(array.nbytes for name, array in stored.items() if name != "note")
    assert 25_000 < tensors < path.stat().st_size < 1.05 * tensors
    network = load(path)
    for level, expected in levels.items():
        with torch.no_grad():
            outputs = expected(torch.from_numpy(X)).numpy()
        assert np.abs(network.switch("1.0", level)(X) - outputs).max() < 1e-5
    graph = onnx.load_from_string(network._source.file.graphs).graph
    kinds = [node.op_type for node in graph.node if node.op_type not in ("Sub", "Mul", "Add")]
    assert kinds == ["Conv", "Relu", "Conv", "BatchNormalization", "Relu", "ReduceMean", "Gemm"]


def test_a_network_that_takes_one_batch_size_is_refused_in_words(tmp_path: Path) -> None:
    network, (x,) = TOPOLOGIES["from_settings"]()
    signature = Signature(tuple(x.shape[1:]), False, (), True, 3, None, None, None, None)
    with pytest.raises(ModelError, match="cannot be read back: the network does not run on these inputs"):
        write_onnx_bundle(
            [Entry("1.0", 1.0, {None: network.eval()})], tmp_path / "net.anysize", signature, trace(network, x)
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["heterofl-onnx", "heterofl-onnx-packed"])
def test_every_size_of_the_fixture_gives_the_outputs_that_pytorch_gave(name: str) -> None:
    network = load(FIXTURE.with_name(f"{name}.anysize"))
    for size, expected in RECORDED.items():
        assert np.abs(network.switch(size)(X) - np.array(expected)).max() < 1e-5


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "anysize", "onnx", "cryptography"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import numpy, device
network = device.load(sys.argv[1], "0.25")
print(network.switch("0.5")(numpy.zeros((3, 1, 8, 8), numpy.float32)).shape)
"""


def test_the_runtime_runs_alone_without_pytorch(tmp_path: Path) -> None:
    shutil.copy(str(onnx_runtime.__file__), tmp_path / "device.py")
    command = [sys.executable, "-c", ALONE, str(FIXTURE)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(3, 10)"


def test_sizes_share_equal_weights_and_forgetting_frees_the_others() -> None:
    network = load(FIXTURE)
    network.switch("0.5")
    own = {id(weight) for weight in network._in_use.session.weights.values()}
    network.switch("1.0")
    assert own & {id(weight) for weight in network._in_use.session.weights.values()}
    network.forget()
    assert [label for label, _ in network._ready] == ["1.0"]
    assert len(network._source._weights) == 14
    assert np.abs(network.switch("0.5")(X) - np.array(RECORDED["0.5"])).max() < 1e-5
    small_cache = load(FIXTURE, cache=1)
    small_cache.switch("0.25")
    assert len(small_cache._ready) == 1


@pytest.mark.parametrize(("module", "file"), [(runtime, "heterofl"), (onnx_runtime, "heterofl-onnx")])
def test_a_printed_network_tells_its_sizes_and_the_one_in_use(module: Any, file: str) -> None:
    network = module.load(FIXTURE.with_name(f"{file}.anysize"), "0.25")
    sizes = ", ".join(network.sizes)
    assert repr(network) == f"<Network, size 0.25 in use; it has {sizes}>"
    assert repr(network.switch("1.0")) == f"<Network, size 1.0 in use; it has {sizes}>"


def test_threads_that_switch_and_predict_at_once_get_whole_networks() -> None:
    network, failures = load(FIXTURE, threads=1), []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                network.switch(network.sizes[(turn * number) % 3])
                outputs = network(X)
                assert any(np.allclose(outputs, one, atol=1e-5) for one in RECORDED.values())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    "x, words",
    [
        (np.zeros((1, 8, 8), np.float32), "shape"),
        (np.zeros((2, 1, 8, 8)), "expected float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: Any, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        load(FIXTURE)(x)


def test_a_bundle_of_the_other_kind_is_refused() -> None:
    with pytest.raises(BundleError, match="has format 'anysize-bundle-1', and this runtime reads anysize-onnx-3"):
        load(FIXTURE.with_name("heterofl.anysize"))
    with pytest.raises(runtime.BundleError, match="has format 'anysize-onnx-1', and this runtime reads anysize-b"):
        runtime.load(FIXTURE)


def model_of(*nodes: Any, initial: Any = (), functions: Any = ()) -> bytes:
    one = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])]
    model = helper.make_model(helper.make_graph(list(nodes), "g", one, out, list(initial)), functions=list(functions))
    return model.SerializeToString()


def outside(name: str) -> Any:
    tensor = TensorProto(name=name, dims=[1], data_type=1, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    return tensor


RELU = helper.make_node("Relu", ["x"], ["y"])
INNER = helper.make_graph([RELU], "inner", [], [])
HOSTILE = {
    "another domain": model_of(helper.make_node("Relu", ["x"], ["y"], domain="com.microsoft")),
    "random numbers": model_of(helper.make_node("RandomNormalLike", ["x"], ["y"])),
    "a graph inside": model_of(helper.make_node("If", ["x"], ["y"], then_branch=INNER, else_branch=INNER)),
    "a tensor in a file": model_of(RELU, initial=[outside("secret")]),
    "a constant in a file": model_of(helper.make_node("Constant", [], ["y"], value=outside("c"))),
    "a function": model_of(
        RELU, functions=[helper.make_function("d", "f", ["x"], ["y"], [RELU], [onnx.helper.make_opsetid("", 18)])]
    ),
    "no graph": b"",
    "half a message": model_of(RELU)[:-3],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_graph_that_could_do_more_than_compute_is_refused(case: str) -> None:
    with pytest.raises(ValueError):
        check_graph(HOSTILE[case], {"t0"})


def test_a_plain_graph_is_allowed() -> None:
    check_graph(model_of(RELU, initial=[outside("t0")]), {"t0"})
