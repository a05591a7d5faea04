"""A bundle: every size in one file, read by a runtime that knows nothing else of the package."""

from __future__ import annotations

import copy
import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

import anysize as az
import small
from anysize import runtime
from anysize.elastic.axes import trace
from anysize.elastic.ensemble import mixed
from anysize.elastic.skeleton import fill, hollow, tensors_of
from anysize.elastic.slicing import narrow, take
from anysize.errors import ModelError
from anysize.experiment.signature import Signature
from anysize.exports.bundle import write_bundle
from anysize.exports.packing import Entry, Extras
from anysize.runtime import BundleError, load
from bundles import assembled, parts_of
from topologies import TOPOLOGIES


def run_of(directory: Path, method: Any, model: Any, capacities: list[float]) -> az.Run:
    tokens = isinstance(model, dict) and model["name"] == "char-lstm"
    x = torch.randint(7, (60, 6), generator=torch.Generator().manual_seed(0))
    return az.Experiment(
        data=az.Data(train=(x[:, :-1], x[:, 1:]), test=(x[:6, :-1], x[:6, 1:])) if tokens else "digits",
        clients=4,
        partition={} if tokens else {"fraction": 0.1},
        model=model,
        method=method,
        task="next-token" if tokens else "classification",
        devices={"capacities": capacities},
        rounds=1,
        training={"local_steps": 2, "learning_rate": 0.05},
        engine={"name": "inprocess"},
    ).run(directory)


RESNET = {"name": "resnet14", "options": {"channels": [4, 8, 8]}}
LSTM = {"name": "char-lstm", "options": {"embedding": 8, "hidden": 16}}
CASES = {
    "fedavg": ({"name": "fedavg", "width": "each"}, "small-cnn"),
    "heterofl": ("heterofl", "small-cnn"),
    "flanc": ("flanc", "small-cnn"),
    "heterofl-resnet": ("heterofl", RESNET),
    "flanc-resnet": ("flanc", RESNET),
    "heterofl-lstm": ("heterofl", LSTM),
    "flanc-lstm": ("flanc", LSTM),
}


def inputs_of(run: az.Run, count: int) -> Tensor:
    about = run.experiment.signature
    random = torch.Generator().manual_seed(1)
    if about.tokens:
        return torch.randint(7, (count, *about.input_shape), generator=random)
    return torch.rand(count, *about.input_shape, generator=random)


@pytest.mark.parametrize("case", small.fast_if({"heterofl", "flanc", "heterofl-lstm"}.__contains__, CASES))
def test_every_size_of_the_bundle_gives_what_the_customised_network_gives(tmp_path: Path, case: str) -> None:
    run = run_of(tmp_path / "run", *CASES[case], [0.5, 1.0])
    done = run.bundle(tmp_path / "net.anysize")
    network = load(done.path)
    assert network.sizes == ("0.5", "1.0")
    assert network.size == "1.0"
    for size in ("0.5", "1.0", "0.5"):
        expected = run.customize(size)
        for count in (1, 4):
            x = inputs_of(run, count)
            with torch.no_grad():
                assert torch.allclose(network.switch(size)(x), expected(x), atol=1e-5)


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> tuple[az.Run, Path]:
    """HeteroFL's four widths, and their bundle."""
    folder = tmp_path_factory.mktemp("bundle")
    run = run_of(folder / "run", "heterofl", "small-cnn", [0.25, 0.5, 0.75, 1.0])
    return run, run.bundle(folder / "net.anysize").path


def stored_bytes(path: Path) -> int:
    """Of the tensors of a bundle."""
    return tensor_bytes({name: t for name, t in safetensors.torch.load_file(path).items() if name != "note"})


def tensor_bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_the_file_is_hardly_larger_than_its_tensors_and_slices_are_stored_once(sliced: tuple[az.Run, Path]) -> None:
    run, path = sliced
    stored = stored_bytes(path)
    assert stored < path.stat().st_size < 1.01 * stored
    # Four widths need the full network's tensors and each width's own statistics.
    assert stored < 1.02 * tensor_bytes(tensors_of(run.customize("1.0")))


def test_composed_widths_share_their_basis_in_the_file(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "flanc", "small-cnn", [0.25, 0.5, 0.75, 1.0])
    done = run.bundle(tmp_path / "net.anysize")
    stored = stored_bytes(done.path)
    assert done.size_bytes < 1.01 * stored
    apart = sum(tensor_bytes(tensors_of(run.customize(size.label))) for size in run.sizes)
    state = run.state
    factors = sum(t.numel() for t in state.basis.values())
    factors += sum(t.numel() for own in state.coefficients.values() for t in own.values())
    dense = sum(t.numel() for own in state.dense.values() for t in own.values())
    assert stored <= 4 * (factors + dense + 8) < apart


def test_an_ensembles_operations_are_written_once(tmp_path: Path) -> None:
    """Without, the note of eight small networks in four sizes would be more than a hundredth of their tensors."""

    def base(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [
                layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            ]
            return nn.Sequential(
                nn.Conv2d(1, 8, 3), *layers, nn.Flatten(), nn.Linear(288, 100), nn.Linear(100, 10)
            ).eval()

    bases = [base(seed) for seed in range(8)]
    entries = [entry_of(str(count / 8), count / 8, mixed(bases[:count])) for count in (1, 2, 4, 8)]
    signature = Signature((1, 8, 8), False, (), True, 10, 10, None, None, None)
    done = write_bundle(entries, tmp_path / "net.anysize", signature, trace(base(0), torch.zeros(2, 1, 8, 8)))
    stored = stored_bytes(done.path)
    assert done.size_bytes < 1.01 * stored
    graphs = parts_of(done.path.read_bytes())[1]["graphs"]
    alone = len(graphs[-1]["nodes"])
    assert [graph.get("repeat", [0, 1])[1] for graph in graphs] == [8, 4, 2, 1]
    assert [len(graph["nodes"]) for graph in graphs] == [alone + 8, alone + 4, alone + 2, alone]  # sums, and the mean
    x, network = torch.rand(5, 1, 8, 8), load(done.path)
    for count in (8, 1, 4):
        with torch.no_grad():
            expected = torch.stack([one(x) for one in bases[:count]]).mean(0)
        assert torch.allclose(network.switch(str(count / 8))(x), expected, atol=1e-5)


def test_switching_between_networks_in_memory_takes_less_than_a_millisecond(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1])
    for size in network.sizes:
        network.switch(size)
    seconds = []
    for turn in range(100):
        began = time.perf_counter()
        network.switch(network.sizes[turn % 4])
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 1e-3


def test_a_size_reads_no_more_of_the_file_than_it_needs(
    sliced: tuple[az.Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = sliced
    read: list[Tensor] = []
    fetch = runtime._Source._fetch

    def counted(self: Any, *arguments: Any) -> Tensor:
        read.append(fetch(self, *arguments))
        return read[-1]

    monkeypatch.setattr(runtime._Source, "_fetch", counted)
    network = load(path, "0.25", verify=False)
    needed = sum(t.numel() for t in tensors_of(run.customize("0.25")).values())
    # The classifier's inputs are 16 positions of each channel, in runs; two numbers normalise.
    assert sum(tensor.numel() for tensor in read) <= needed + 10
    before = len(read)
    network.switch("1.0")
    network.switch("0.25")
    network.switch("0.5")
    assert before < len(read)
    held = {tensor.untyped_storage().data_ptr() for tensor in read}
    big = [tensor for tensor in network._in_use.tensors if tensor.numel() > 1000]
    assert big
    assert all(tensor.untyped_storage().data_ptr() in held for tensor in big)  # views of the full size's tensors


def test_forgetting_frees_the_networks_that_are_not_in_use(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1])
    x = torch.rand(2, 1, 8, 8)
    before = network.switch("0.5")(x)
    network.switch("1.0")
    network.forget()
    assert list(network._ready) == [("1.0", None)]
    assert torch.equal(network.switch("0.5")(x), before)


# What a size costs, and which one fits ------------------------------------------------------------------


def test_the_bundle_states_what_every_size_costs_and_what_its_metrics_are(sliced: tuple[az.Run, Path]) -> None:
    run, path = sliced
    choices = load(path).choices
    evaluated = run.evaluate()
    assert [choice.size for choice in choices] == ["0.25", "0.5", "0.75", "1.0"]
    for choice in choices:
        network = run.customize(choice.size)
        assert choice.robustness is None
        assert choice.costs["parameters"] == sum(parameter.numel() for parameter in network.parameters())
        assert choice.costs["inference_bytes"] == tensor_bytes(tensors_of(network))
        assert choice.costs["macs"] == run.cost(run.size(choice.size)).macs
        assert choice.metrics["accuracy"] == pytest.approx(evaluated[choice.size]["accuracy"], abs=1e-9)
        assert choice.float32 == {}
        assert "latency_ms" not in choice.costs


def test_a_device_chooses_the_largest_size_that_fits(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1])
    costs = {choice.size: choice.costs for choice in network.choices}
    assert network.fit(inference_bytes=costs["0.5"]["inference_bytes"]).size == "0.5"
    assert network.fit(inference_bytes=costs["0.5"]["inference_bytes"] - 1).size == "0.25"
    assert network.fit(inference_bytes=1e9, macs=costs["0.75"]["macs"]).size == "0.75"
    with pytest.raises(BundleError, match=r"no size fits macs = 1; the nearest is 0\.25, which needs macs = \d+"):
        network.fit(macs=1)
    with pytest.raises(BundleError, match=r"does not know latency_ms.*measure\(\)"):
        network.fit(latency_ms=5)
    with pytest.raises(BundleError, match="does not know bytes"):
        network.fit(bytes=5)
    for wrong in ({}, {"macs": 0}, {"macs": float("nan")}, {"macs": "many"}):
        with pytest.raises(BundleError, match="numbers above 0"):
            network.fit(**wrong)
    assert network.size == "0.75"


def test_a_device_times_its_sizes_and_chooses_by_that(
    sliced: tuple[az.Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = load(sliced[1], "0.5")
    slow = {"0.25": 1.0, "0.5": 2.0, "0.75": 3.0, "1.0": 4.0}
    monkeypatch.setattr(runtime, "_seconds", lambda work: (work(), slow[network.size] / 1000)[1])
    assert network.measure(repeats=3) == pytest.approx(slow)
    assert (network.size, list(network._ready)) == ("0.5", [("0.5", None)])
    assert network.fit(latency_ms=3.5).size == "0.75"
    assert [choice.costs["latency_ms"] for choice in network.choices] == pytest.approx(list(slow.values()))


# Memory ---------------------------------------------------------------------------------------------


def held_bytes(network: runtime.Network) -> int:
    """The distinct memory of everything that a network holds."""
    tensors = list(network._source._read.values())
    for ready in network._ready.values():
        tensors += ready.tensors
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_forgetting_a_larger_size_frees_its_memory_and_reads_nothing(
    sliced: tuple[az.Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sliced[1]
    alone = held_bytes(load(path, "0.25"))
    network = load(path, "1.0")
    x = torch.rand(2, 1, 8, 8)
    before = network.switch("0.25")(x)
    monkeypatch.setattr(runtime._Source, "_fetch", lambda *_: pytest.fail("it was read again"))
    assert held_bytes(network) > 5 * alone
    network.forget()
    assert held_bytes(network) == alone
    assert torch.equal(network(x), before)


def test_a_single_size_is_forgotten_and_the_others_stay(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1], "1.0")
    network.switch("0.5").switch("0.25").forget("1.0")
    assert [label for label, _ in network._ready] == ["0.5", "0.25"]
    assert held_bytes(network) < held_bytes(load(sliced[1], "1.0")) / 2
    with pytest.raises(BundleError, match="in use"):
        network.forget("0.25")
    with pytest.raises(BundleError, match="not in the bundle"):
        network.forget("0.3")


def test_no_more_networks_stay_in_memory_than_the_cache_allows(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1], "1.0", cache=2)
    x = torch.rand(2, 1, 8, 8)
    expected = {size: load(sliced[1], size)(x) for size in network.sizes}
    for size in ("0.5", "0.25", "1.0", "0.5", "0.75", "0.25"):
        assert torch.allclose(network.switch(size)(x), expected[size], atol=1e-6)
        assert len(network._ready) <= 2
    assert [label for label, _ in network._ready] == ["0.75", "0.25"]
    with pytest.raises(BundleError, match="at least 1"):
        load(sliced[1], cache=0)


def test_a_network_moves_to_another_device_with_everything_it_makes(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1], "0.5").to("meta")
    outputs = network(torch.rand(3, 1, 8, 8))
    assert (outputs.device.type, outputs.shape) == ("meta", (3, 10))
    assert {tensor.device.type for tensor in network._in_use.tensors} == {"meta"}
    assert network.switch("0.25")(torch.rand(3, 1, 8, 8)).is_meta


def test_a_call_computes_where_its_tensors_are_while_another_thread_moves_the_network(
    sliced: tuple[az.Run, Path],
) -> None:
    network, x = load(sliced[1]), torch.rand(2, 1, 8, 8)
    expected = network(x)
    network._source.device = torch.device("meta")  # `to` has begun, and the networks are not yet moved
    assert torch.equal(network(x), expected)


def test_threads_that_switch_and_predict_at_once_get_whole_networks(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1], cache=2)
    x = torch.rand(2, 1, 8, 8)
    allowed = [load(sliced[1], size)(x) for size in network.sizes]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                network.switch(network.sizes[(turn * (number + 1)) % 4])
                outputs = network(x)
                assert any(torch.allclose(outputs, one, atol=1e-6) for one in allowed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Fewer bits -------------------------------------------------------------------------------------------


def test_int8_weights_are_a_quarter_and_the_file_states_the_metrics_before_and_after(
    sliced: tuple[az.Run, Path], tmp_path: Path
) -> None:
    run, path = sliced
    done = run.bundle(tmp_path / "net.anysize", precision="int8")
    assert done.size_bytes < 0.3 * path.stat().st_size
    network, whole = load(done.path), load(path)
    x = torch.rand(20, 1, 8, 8)
    for choice, plain in zip(network.choices, whole.choices):
        assert choice.float32 == plain.metrics
        outputs = network.switch(choice.size)(x)
        # The weights that the bytes say, in the network of PyTorch.
        rounded = run.customize(choice.size)
        with torch.no_grad():
            for weight in rounded.parameters():
                weight.copy_(eight_bit(weight) if weight.numel() >= 1024 and choice.size == "1.0" else weight)
            if choice.size == "1.0":
                assert torch.allclose(outputs, rounded(x), atol=1e-4)
            assert 0 < (outputs - whole.switch(choice.size)(x)).abs().max() < 0.1
    assert network.about["precision"] == "int8"


def eight_bit(weight: Tensor) -> Tensor:
    """The weight with each row rounded to 255 steps, in numpy."""
    rows = weight.detach().numpy().reshape(len(weight), -1)
    steps = np.abs(rows).max(1, keepdims=True).astype(np.float32) / np.float32(127)
    steps[steps == 0] = 1
    return torch.from_numpy(np.round(rows / steps) * steps).reshape(weight.shape)


@pytest.mark.slow
def test_float16_weights_are_half(sliced: tuple[az.Run, Path], tmp_path: Path) -> None:
    run, path = sliced
    done = run.bundle(tmp_path / "net.anysize", precision="float16")
    assert done.size_bytes < 0.53 * path.stat().st_size
    x = torch.rand(20, 1, 8, 8)
    expected = run.customize("1.0")
    with torch.no_grad():
        for weight in expected.parameters():
            weight.copy_(weight.half().float() if weight.numel() >= 1024 else weight)
        assert torch.allclose(load(done.path)(x), expected(x), atol=1e-5)


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("anysize.") and name != "anysize.runtime":
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
import torch
from anysize.runtime import load
network = load(sys.argv[1], "0.5")
x = torch.ones(2, 1, 8, 8) / 2
print(network.switch("0.25")(x).sum().item(), network.predict(x)[0])
foreign = {"numpy", "pydantic", "sklearn", "typer", "torch_pruning"} & set(sys.modules)
print(sorted(foreign - {"numpy"}))
"""


def test_the_runtime_needs_nothing_else_of_the_package(sliced: tuple[az.Run, Path]) -> None:
    run, path = sliced
    done = subprocess.run([sys.executable, "-c", ALONE, str(path)], capture_output=True, text=True, check=True)
    first, foreign = done.stdout.splitlines()
    network = run.customize("0.25")
    with torch.no_grad():
        outputs = network(torch.ones(2, 1, 8, 8) / 2)
    assert float(first.split()[0]) == pytest.approx(float(outputs.sum()), abs=1e-4)
    assert first.split()[1] == str(int(outputs[0].argmax()))
    assert foreign == "[]"


def test_the_runtime_can_be_copied_alone(sliced: tuple[az.Run, Path], tmp_path: Path) -> None:
    shutil.copy(str(runtime.__file__), tmp_path / "device.py")
    code = "import sys, device, torch; print(device.load(sys.argv[1])(torch.zeros(3, 1, 8, 8)).shape)"
    command = [sys.executable, "-c", code, str(sliced[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.stdout.strip() == "torch.Size([3, 10])"


def test_the_code_of_the_page_runs(
    sliced: tuple[az.Run, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "devices.md").read_text(encoding="utf-8")
    block, _ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shutil.copy(sliced[1], tmp_path / "net.anysize")
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec(compile(block, "devices.md", "exec"), made)
    assert made["logits"].shape == (5, 10)
    assert len(made["names"]) == 5


def test_the_same_run_gives_the_same_bundle_byte_for_byte(sliced: tuple[az.Run, Path], tmp_path: Path) -> None:
    again = sliced[0].bundle(tmp_path / "again.anysize")
    assert again.path.read_bytes() == sliced[1].read_bytes()


def test_the_bundle_knows_inputs_classes_and_normalisation(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1])
    about = sliced[0].experiment.signature
    assert network.input_shape == (1, 8, 8)
    assert network.about["mean"] == pytest.approx(about.mean)
    assert network.about["std"] == pytest.approx(about.std)
    assert network.class_names == about.class_names
    assert network.levels == ()
    assert network.about["method"] == "heterofl"


@pytest.mark.parametrize(
    "x, words",
    [
        (torch.zeros(1, 8, 8), "shape"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.float64), "expected float32"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "expected float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(sliced: tuple[az.Run, Path], x: Tensor, words: str) -> None:
    with pytest.raises(BundleError, match=words):
        load(sliced[1])(x)


def test_a_size_or_robustness_that_is_not_there_is_refused_and_the_old_one_stays(sliced: tuple[az.Run, Path]) -> None:
    network = load(sliced[1], "0.5")
    with pytest.raises(BundleError, match=r"no size '0.3'.*0.25, 0.5, 0.75, 1.0"):
        network.switch("0.3")
    with pytest.raises(BundleError, match="not trained for robustness"):
        network.switch("1.0", robustness=0.5)
    assert network.size == "0.5"


# Damaged and hostile files ------------------------------------------------------------------------


def changed(path: Path, out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A bundle whose note was changed, its checksum made anew as an attacker would."""
    header, note, data = parts_of(path.read_bytes())
    change(note)
    out.write_bytes(assembled(header, note, data))
    return out


def node(operation: str, arguments: list[Any], **options: Any) -> Callable[[dict[str, Any]], object]:
    """A change that puts an operation in place of the last."""

    def change(note: dict[str, Any]) -> None:
        graph = note["graphs"][0]
        graph["operations"].append(operation)
        graph["nodes"][-1] = [len(graph["operations"]) - 1, arguments, options]

    return change


def first_recipe(recipe: Any) -> Callable[[dict[str, Any]], object]:
    return lambda note: note["networks"][-1]["tensors"].__setitem__(0, recipe)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an operation that is not allowed": (node("aten.set_.source_Tensor", ["#1", "#2"]), "not allowed: aten.set_"),
    "a function of Python": (node("os.system", ["=true"]), "not allowed: os.system"),
    "a value of a terabyte": (node("aten.zeros.default", [[1 << 20, 1 << 20]]), "larger than 1 GiB"),
    "a size below zero": (node("aten.zeros.default", [[-1, 10]]), "does not run"),
    "another output": (node("aten.zeros.default", [[1, 11]]), "returns \\(11,\\)"),
    "a value from the future": (node("aten.relu.default", ["#99"]), "before it is computed"),
    "a tensor that is not there": (node("aten.relu.default", ["$99"]), "does not run"),
    "a constant that is unknown": (node("aten.zeros.default", [[1, 10]], dtype="@__class__"), "not a constant"),
    "an argument of no kind": (node("aten.relu.default", [{"a": 1}]), "not an argument"),
    "an operation that is not listed": (lambda note: note["graphs"][0]["nodes"][0].__setitem__(0, 77), "not listed"),
    "no operations": (lambda note: note["graphs"][0].update(nodes=[]), "0 operations"),
    "more repeated operations than there are": (
        lambda note: note["graphs"][0].update(repeat=[999, 2, 0]),
        "999 operations 2 times",
    ),
    "operations without end": (lambda note: note["graphs"][0].update(repeat=[1, 1 << 40, 0]), "1 operations"),
    "nothing without end": (lambda note: note["graphs"][0].update(repeat=[0, 1 << 40, 0]), "0 operations"),
    "a repetition of no kind": (lambda note: note["graphs"][0].update(repeat=["1", 2, 0]), "cannot repeat"),
    "no networks": (lambda note: note.update(networks=[]), "no network"),
    "a program that is not there": (lambda note: note["networks"][0].update(graph=5), "no program"),
    "a tensor that is not stored": (first_recipe(-999), "not stored"),
    "a part beyond a tensor": (first_recipe([0, [1 << 30]]), "not a part of an axis"),
    "a part with too many rows": (first_recipe([0, [[[0, 1]] * 1000]]), "not a part of an axis"),
    "an axis too many": (first_recipe([0, [None] * 9]), "no axis"),
    "a recipe of no kind": (first_recipe("x"), "damaged"),
    "a product of one": (first_recipe({"product": [0]}), "damaged"),
    "a small tensor beyond the end": (lambda note: note["small"].insert(0, [1 << 40]), "small tensors have"),
    "a shape below zero": (lambda note: note["small"].insert(0, [-4]), "not a shape"),
    "an input of no shape": (lambda note: note.update(input_shape=["a"]), "not a shape"),
    "a note without sizes": (lambda note: note.pop("networks"), "has no 'networks'"),
    "another format": (lambda note: note.update(format="other"), "has format 'other', and this runtime reads"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_bundle_is_refused(sliced: tuple[az.Run, Path], tmp_path: Path, case: str) -> None:
    change, words = HOSTILE[case]
    with pytest.raises(BundleError, match=words):
        load(changed(sliced[1], tmp_path / "bad.anysize", change))


def test_a_bundle_that_was_only_written_again_is_read(sliced: tuple[az.Run, Path], tmp_path: Path) -> None:
    load(changed(sliced[1], tmp_path / "same.anysize", lambda note: None))


def test_a_damaged_bundle_is_refused(sliced: tuple[az.Run, Path], tmp_path: Path) -> None:
    whole, path = sliced[1].read_bytes(), tmp_path / "bad.anysize"
    flipped = bytearray(whole)
    flipped[-5000] ^= 1
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "other")
    for blob, words in (
        (whole[: len(whole) // 2], "damaged"),
        (bytes(flipped), "checksum"),
        (b"", "damaged"),
        (b"PK\x03\x04" * 100, "damaged"),
        ((tmp_path / "other").read_bytes(), "no 'anysize'"),
    ):
        path.write_bytes(blob)
        with pytest.raises(BundleError, match=words):
            load(path)
    with pytest.raises(BundleError, match="does not exist"):
        load(tmp_path / "none.anysize")


# Writing ------------------------------------------------------------------------------------------


def entry_of(label: str, width: float, network: nn.Module) -> Entry:
    return Entry(label, width, {None: network.eval()})


REFUSED = {
    "batch_norm_without_statistics": "normalises by the batch at hand",
    "experts": "which tokens go to which expert depends on the numbers",
    "from_settings": "len(x) makes the batch size a constant",
    "lstm_projected": "torch.export gives another function",
    "vit_chunk": "len(x) makes the batch size a constant",
    "vit_fused": "len(x) makes the batch size a constant",
    "vit_separate": "len(x) makes the batch size a constant",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_topology_that_torch_cannot_trace_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    network, (x,) = TOPOLOGIES[name]()
    signature = Signature(tuple(x.shape[1:]), not x.is_floating_point(), (), True, 3, None, None, None, None)
    with pytest.raises(ModelError):
        write_bundle([entry_of("1.0", 1.0, network)], tmp_path / "net.anysize", signature, trace(network, x))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(TOPOLOGIES) - set(REFUSED)))
def test_every_topology_and_its_half_can_be_bundled(tmp_path: Path, name: str) -> None:
    network, (x,) = TOPOLOGIES[name]()
    tokens = not x.is_floating_point()
    axes = trace(network.eval(), x)
    half = fill(
        narrow(hollow(network), axes, 0.5),
        {n: take(t, axes.index(n, axes.kept(0.5))) for n, t in tensors_of(network).items()},
    )
    with torch.no_grad():
        output = network(x)
    signature = Signature(tuple(x.shape[1:]), tokens, (), True, output.shape[-1], None, None, None, None)
    done = write_bundle(
        [entry_of("half", 0.5, half), entry_of("full", 1.0, network)], tmp_path / "net.anysize", signature, axes
    )
    assert torch.allclose(load(done.path, "half")(x), half(x), atol=1e-4)
    # Inner parts of the full network's tensors are not stored again.
    stored = stored_bytes(done.path)
    assert stored <= tensor_bytes(tensors_of(network)) + 4 * sum(t.numel() for t in network.buffers()) + 2000


def test_a_network_that_looks_at_the_whole_batch_is_refused(tmp_path: Path) -> None:
    network, (x,) = TOPOLOGIES["batch_norm_without_statistics"]()
    signature = Signature(tuple(x.shape[1:]), False, (), True, 3, None, None, None, None)
    with pytest.raises(ModelError, match="outputs differ from the networks' by"):
        write_bundle(
            [entry_of("1.0", 1.0, network)], tmp_path / "net.anysize", signature, trace(network, torch.zeros_like(x))
        )
    assert list(tmp_path.iterdir()) == []


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.fft.fft(x).abs())


def test_a_network_with_an_operation_that_no_bundle_holds_is_refused_by_its_name(tmp_path: Path) -> None:
    network = Spectrum().eval()
    signature = Signature((8,), False, (), True, 4, 4, None, None, None)
    axes = trace(nn.Sequential(nn.Linear(8, 4)), torch.zeros(2, 8))
    with pytest.raises(ModelError, match=r"aten\._fft"):
        write_bundle([entry_of("1.0", 1.0, network)], tmp_path / "net.anysize", signature, axes)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_writes_a_bundle(
    sliced: tuple[az.Run, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, path = sliced[0].directory, tmp_path / "net.anysize"
    code, out, err = small.call(monkeypatch, capsys, "customize", directory, "--bundle", path)
    assert code == 0, err
    assert "0.25, 0.5, 0.75, 1.0" in out + err
    assert load(path).sizes == ("0.25", "0.5", "0.75", "1.0")
    some = tmp_path / "some.anysize"
    assert small.call(monkeypatch, capsys, "customize", directory, "--bundle", some, "--size", "0.5,0.6")[0] == 0
    assert load(some).sizes == ("0.5", "0.6")
    _, said, _ = small.call(monkeypatch, capsys, "customize", directory, "--bundle", some, "--precision", "int8")
    losses = [line for line in said.splitlines() if line.startswith("  size")]
    for choice, line in zip(load(some).choices, losses, strict=True):
        now, before = choice.metrics["accuracy"], choice.float32["accuracy"]
        assert line == f"  size {choice.size}: accuracy {now:.4f}, in float32 {before:.4f}"
    wrong = (["--budget", "macs=1e6"], ["--to", "net.onnx"], ["--runtime", "tf"], ["--precision", "int4"])
    for more in wrong:
        assert small.call(monkeypatch, capsys, "customize", directory, "--bundle", path, *more)[0] == 2
    assert small.call(monkeypatch, capsys, "customize", directory, "--bundle", tmp_path / "net.zip")[0] == 2
    _, _, err = small.call(monkeypatch, capsys, "customize", directory, "--bundle", tmp_path / "net.onnx")
    assert "a bundle of sizes ends in .anysize; .onnx holds one customised size" in err
    assert small.call(monkeypatch, capsys, "customize", directory)[0] == 2


# Bundles from before --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["heterofl", "flanc", "splitmix", "heterofl-packed"])
def test_a_bundle_that_an_earlier_version_wrote_gives_the_outputs_that_it_gave_then(method: str) -> None:
    """Commit 4de8ceb wrote the bundles and the outputs; in a packed one, the note is compressed, as it is today."""
    folder = Path(__file__).parent / "fixtures" / "bundles"
    recorded = json.loads((folder / "outputs.json").read_text())[method.removesuffix("-packed")]
    x = torch.arange(2 * 64).reshape(2, 1, 8, 8) % 17 / 16
    bundle = folder / f"{method}.anysize"
    assert list(recorded) == ["0.25", "0.5", "1.0"]
    for label, expected in recorded.items():
        torch.testing.assert_close(runtime.load(bundle, label)(x), torch.tensor(expected), rtol=0, atol=1e-5)


class Causal(nn.Module):
    """Positions that see themselves and what came before, by a mask of minus infinity."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((40, 40), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.read(x)
        return self.head((seen @ seen.transpose(1, 2) + self.mask).softmax(-1) @ seen)


def test_a_mask_may_hold_minus_infinity_and_weights_may_not(tmp_path: Path) -> None:
    network, x = Causal().eval(), torch.rand(2, 40, 8)
    signature, axes = Signature((40, 8), False, (), True, 3, 3, None, None, None), trace(network, x)
    for precision in ("float32", "int8"):
        path = tmp_path / f"{precision}.anysize"
        write_bundle([entry_of("1.0", 1.0, network)], path, signature, axes, extras=Extras(precision=precision))
        assert torch.allclose(load(path)(x), network(x), atol=1e-2 if precision == "int8" else 1e-5)
        stored = safetensors.torch.load_file(path)
        assert [name for name, tensor in stored.items() if tensor.isneginf().any()] == ["mask/1.0/mask"]
        for bad in (torch.nan, torch.inf):
            worse = {name: tensor.clone() for name, tensor in stored.items()}
            worse["mask/1.0/mask"][0, 3] = bad
            with safetensors.safe_open(path, "pt") as file:
                safetensors.torch.save_file(worse, tmp_path / "worse.anysize", file.metadata())
            with pytest.raises(BundleError, match="not finite"):
                load(tmp_path / "worse.anysize", verify=False)(x)
    for bad, name in ((-torch.inf, "read.weight"), (torch.nan, "mask")):
        spoilt = copy.deepcopy(network)
        spoilt.state_dict()[name][0, 0] = bad
        with pytest.raises(ModelError, match=f"'{name}' has numbers that are not finite"):
            write_bundle([entry_of("1.0", 1.0, spoilt)], tmp_path / "spoilt.anysize", signature, axes)
