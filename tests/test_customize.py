"""Networks cut from a run: ordinary, with fixed statistics, and the same in every format."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import anysize as az
import small
from anysize.data import load as load_data
from anysize.errors import ConfigError, MethodError, ModelError
from anysize.experiment.signature import Signature
from anysize.exports.formats import sample_inputs


def trained(directory: Path, method: str, **changes: Any) -> az.Run:
    data = load_data("digits")
    assert isinstance(data, az.Data)
    settings: dict[str, Any] = {
        "devices": {"capacities": [0.25, 0.5, 1.0], "fractions": [0.25, 0.25, 0.5]},
        "rounds": 3,
        "evaluate_every": 3,
        "training": {"learning_rate": 0.05},
    }
    return az.Experiment(
        data=data,
        model=small.normalised_network(),
        method=method,
        clients=4,
        partition={"fraction": 0.3},
        **settings | changes,
    ).run(directory)


@pytest.fixture(scope="module", params=["flanc", "heterofl"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> az.Run:
    """A run of a network with batch-norm."""
    return trained(tmp_path_factory.mktemp("customize") / "run", request.param)


X = sample_inputs(Signature((1, 8, 8), False, (), True, 10, 10, None, None, None), 5)


@pytest.mark.parametrize("size", ["0.25", "1.0"])
def test_onnx_gives_what_pytorch_gives_for_one_sample_and_for_many(tmp_path: Path, run: az.Run, size: str) -> None:
    network = run.customize(size)
    done = az.export(network, tmp_path / "net.onnx", run.experiment.signature, {"size": size})
    assert done.size_bytes == (tmp_path / "net.onnx").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx"]
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    expected = network(X).detach().numpy()
    together = session.run(None, {"input": X.numpy()})[0]
    alone = np.concatenate([session.run(None, {"input": X[i : i + 1].numpy()})[0] for i in range(len(X))])
    np.testing.assert_allclose(together, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(alone, together, rtol=1e-3, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["anysize"]) == {"size": size}


def test_an_exported_program_gives_what_pytorch_gives(tmp_path: Path, run: az.Run) -> None:
    network = run.customize(0.5)
    az.export(network, tmp_path / "net.pt2", run.experiment.signature)
    program = torch.export.load(tmp_path / "net.pt2").module()
    together = program(X)
    torch.testing.assert_close(together, network(X))
    torch.testing.assert_close(torch.cat([program(X[i : i + 1]) for i in range(len(X))]), together)


def test_safetensors_hold_the_networks_own_state(tmp_path: Path, run: az.Run) -> None:
    network = run.customize(0.5)
    az.export(network, tmp_path / "net.safetensors", run.experiment.signature, {"size": "0.5"})
    stored = safetensors.torch.load_file(tmp_path / "net.safetensors")
    assert set(stored) == set(network.state_dict())
    assert all(torch.equal(stored[name], tensor) for name, tensor in network.state_dict().items())
    with safetensors.safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert json.loads(file.metadata()["anysize"]) == {"size": "0.5"}


def test_a_customised_network_runs_where_this_package_is_not(tmp_path: Path, run: az.Run) -> None:
    network = run.customize(0.5)
    (tmp_path / "net.pickle").write_bytes(pickle.dumps((network, X, network(X).detach())))
    code = f"""
import pickle, sys
sys.modules["anysize"] = None          # importing it now fails
network, x, expected = pickle.load(open({str(tmp_path / "net.pickle")!r}, "rb"))
import torch
torch.testing.assert_close(network(x), expected)
assert not network.training
print("ran without it")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "ran without it\n", done.stderr


def test_a_customised_network_is_really_that_small(run: az.Run) -> None:
    for size, channels in (("0.25", 2), ("0.5", 4), ("1.0", 8)):
        network = run.customize(size)
        assert isinstance(network, nn.Sequential)
        first, last = network[0], network[-1]
        assert isinstance(first, nn.Conv2d)
        assert isinstance(last, nn.Linear)
        assert first.weight.shape == (channels, 1, 3, 3)
        assert last.weight.shape == (10, 4 * channels)


def test_an_untrained_width_is_honest_about_its_accuracy(run: az.Run) -> None:
    metrics = run.evaluate([0.75, 0.5])
    assert set(metrics) == {"0.75", "0.5"}
    data = run.experiment.data
    assert data is not None
    assert data.test is not None
    x, y = data.test.batch(torch.arange(len(data.test)))
    network = run.customize(0.75)
    with torch.no_grad():
        correct = (network(x.float() / 255).argmax(1) == y).float().mean()
    assert metrics["0.75"]["accuracy"] == pytest.approx(float(correct), abs=1e-6)


def test_widths_above_the_largest_trained_are_refused(tmp_path: Path) -> None:
    for method in ("flanc", "heterofl"):
        directory = tmp_path / method
        made = small.experiment(method={"name": method}, devices={"capacities": [0.25, 0.5]}, rounds=1).run(directory)
        with pytest.raises(MethodError, match=r"up to 0\.5"):
            made.customize(0.75)


def test_fedavg_has_no_other_width_than_it_trained(tmp_path: Path) -> None:
    made = small.experiment(method={"name": "fedavg"}, rounds=1).run(tmp_path / "run")
    assert [size.label for size in made.sizes] == ["0.5"]
    with pytest.raises(MethodError, match=r"width 1.*trained 0.5"):
        made.customize(1.0)


def test_a_budget_chooses_the_largest_size_that_fits(run: az.Run) -> None:
    costs = {size.label: run.cost(size) for size in run.sizes}
    exact = az.Budget(inference_bytes=costs["0.5"].inference_bytes, macs=costs["1.0"].macs)
    assert run.fitting(exact).label == "0.5"
    assert sum(p.numel() for p in run.customize(budget=exact).parameters()) == sum(
        p.numel() for p in run.customize(0.5).parameters()
    )
    assert run.fitting(az.Budget(inference_bytes=costs["0.5"].inference_bytes - 1)).label == "0.25"
    with pytest.raises(ConfigError, match=r"no trained size fits.*0.25, needs inference_bytes = \d+"):
        run.fitting(az.Budget(inference_bytes=10))


@pytest.mark.parametrize(
    ("method", "treatment"),
    [
        ("heterofl", "tracked"),
        ("splitmix", "batch"),
        ("flanc", "calibrated"),
        pytest.param("fedavg", "tracked", marks=pytest.mark.slow),
        pytest.param("fedavg", "batch", marks=pytest.mark.slow),
        pytest.param("heterofl", "calibrated", marks=pytest.mark.slow),
        pytest.param("splitmix", "tracked", marks=pytest.mark.slow),
        pytest.param("prism", "batch", marks=pytest.mark.slow),
        pytest.param("flanc", "tracked", marks=pytest.mark.slow),
        pytest.param("fedhm", "batch", marks=pytest.mark.slow),
    ],
)
def test_a_budget_of_inference_bytes_is_met_by_the_file_that_is_written(
    tmp_path: Path, method: str, treatment: str
) -> None:
    made = trained(tmp_path / "run", method, rounds=1, tricks={"batch_norm": treatment})
    shipped = {size.label: written_bytes(made, size.label, tmp_path) for size in made.sizes}
    assert {size.label: made.cost(size).inference_bytes for size in made.sizes} == shipped
    for limit in shipped.values():
        largest = max(count for count in shipped.values() if count <= limit)
        assert shipped[made.fitting(az.Budget(inference_bytes=limit)).label] == largest
    with pytest.raises(ConfigError, match="no trained size fits"):
        made.fitting(az.Budget(inference_bytes=min(shipped.values()) - 1))


def test_a_network_is_as_large_under_every_method_and_every_treatment_of_batch_norm() -> None:
    """Oracle: the tensors of the network as torch makes it."""
    bytes_of_full = sum(tensor.nbytes for tensor in small.normalised_network().state_dict().values())
    for method in ("fedavg", "heterofl", "fjord", "sheterofl", "splitmix", "flanc", "prism", "fedhm", "origdrop"):
        for treatment in ("tracked", "batch", "calibrated", "local"):
            made = az.Experiment(
                data=az.Data(train=(torch.zeros(8, 1, 8, 8), torch.arange(8)), classes=10),
                model=small.normalised_network(),
                method=method,
                clients=4,
                devices={"capacities": [1.0]},
                tricks={"batch_norm": treatment},
            )
            assert made.cost(made.sizes[0]).inference_bytes == bytes_of_full, (method, treatment)


def test_a_device_group_trains_no_size_whose_file_is_above_its_budget(tmp_path: Path) -> None:
    # One byte less than the full network, which fits only if its statistics are forgotten.
    limit = sum(tensor.nbytes for tensor in small.normalised_network().state_dict().values()) - 1
    devices = {"groups": [{"name": "camera", "budget": {"inference_bytes": limit}}]}
    made = trained(tmp_path / "run", "heterofl", rounds=1, devices=devices)
    assert made.sizes[0].width == 14 / 16  # of eight channels, 15 / 16 are eight
    assert written_bytes(made, "camera", tmp_path) <= limit


def written_bytes(made: az.Run, size: str, folder: Path) -> int:
    """The bytes of all tensors in the file of a customised network."""
    az.export(made.customize(size), folder / "net.safetensors", made.experiment.signature)
    return sum(tensor.nbytes for tensor in safetensors.torch.load_file(folder / "net.safetensors").values())


def test_devices_by_name_are_customised_by_name_or_width(tmp_path: Path) -> None:
    groups = [{"name": "a/b [x]", "budget": {"parameters": 700}}, {"name": "board", "capacity": 1.0}]
    made = small.experiment(devices={"capacities": None, "groups": groups}, rounds=1).run(tmp_path / "run")
    labels = [size.label for size in made.sizes]
    assert labels == ["a/b [x]", "1.0"]
    camera = made.size("a/b [x]")
    assert made.size(camera.width) == camera
    assert made.cost(camera).parameters <= 700
    assert set(az.load(tmp_path / "run").evaluate()) == set(labels)


@pytest.mark.parametrize(
    "name, message",
    [
        ("net.onxx", r"unknown export format '.onxx'; did you mean '.onnx'"),
        ("net", "only a network of transformers is written as a folder"),
        ("net.anysize", r"net\.anysize: \.anysize holds a bundle of sizes; one network is \.onnx"),
        ("missing/net.onnx", "the folder .* does not exist"),
        ("folder.onnx", "it is a folder"),
    ],
)
def test_paths_that_cannot_be_written_are_refused(tmp_path: Path, run: az.Run, name: str, message: str) -> None:
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(ModelError, match=message):
        az.export(run.customize(0.5), tmp_path / name, run.experiment.signature)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.onnx"]


class Stubborn(nn.Module):
    """Its forward looks at values, which no tracer can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) * 2 if bool(x.sum() > 1) else x.flatten(1)


class Forgetful(nn.Module):
    """Answers otherwise every time."""

    calls = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Forgetful.calls += 1.0
        return x.flatten(1) + Forgetful.calls


@pytest.mark.skipif(find_spec("executorch") is None, reason="needs the extra executorch")
@pytest.mark.parametrize("model", ["small-cnn", "vit-tiny"])
def test_an_executorch_program_gives_the_same_outputs(tmp_path: Path, model: str) -> None:
    x = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = az.Data(train=(x, torch.arange(8)), test=(x, torch.arange(8)))
    run = az.Experiment(
        data=data,
        clients=2,
        model=model,
        method="heterofl",
        devices={"capacities": [1.0]},
        training={"local_steps": 2},
        rounds=1,
        engine={"name": "inprocess"},
    ).run(tmp_path / "run")
    network = run.customize(size=0.5)
    done = az.export(network, tmp_path / "net.pte", run.experiment.signature)
    torch.save(x, tmp_path / "x.pt")
    alone = (
        "import sys, torch; from executorch.runtime import Runtime\n"
        "program = Runtime.get().load_program(sys.argv[1]); method = program.load_method('forward')\n"
        "torch.save(torch.cat([method.execute([x])[0].clone() for x in torch.load(sys.argv[2]).split(1)]), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", alone, str(done.path), str(tmp_path / "x.pt")], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "x.pt"), network(x), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(find_spec("executorch") is not None, reason="the extra executorch is installed")
def test_without_executorch_a_program_for_it_is_refused_with_the_extra_that_is_missing(tmp_path: Path) -> None:
    data = az.Data(train=(torch.rand(4, 6), torch.arange(4)), test=(torch.rand(4, 6), torch.arange(4)))
    signature = az.Experiment(data=data, clients=2, model="mlp", method="heterofl").signature
    with pytest.raises(ModelError, match=r"ExecuTorch needs executorch, not installed: .*executorch"):
        az.export(nn.Linear(6, 4), tmp_path / "net.pte", signature)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("network", [Stubborn(), Forgetful()])
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_network_that_cannot_be_exported_leaves_no_file(
    tmp_path: Path, run: az.Run, network: nn.Module, ending: str
) -> None:
    (tmp_path / f"net.{ending}").write_bytes(b"an older file")
    with pytest.raises(ModelError, match=r"cannot be written|outputs differ from the network's by"):
        az.export(network, tmp_path / f"net.{ending}", run.experiment.signature)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"an older file"]
