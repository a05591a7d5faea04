"""Different ways to the same result: where two methods or options must agree, they agree bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import anysize as az
from anysize.elastic.basis import compose, principal_basis, project
from anysize.elastic.skeleton import tensors_of
from anysize.methods import FLANC, FedAvg, HeteroFL, Method
from anysize.methods.size import Size
from anysize.testing import convolutional
from anysize.wire import Tensors, flatten

EQUAL: dict[str, Any] = {
    "masked_loss": True,
    "classwise_head": True,
    "batch_norm": "calibrated",
    "weighting": "samples",
}


def digits(method: Method[Any], capacities: list[float], out: Path, **more: Any) -> Tensors:
    """The state's tensors after two rounds on digits."""
    tricks = EQUAL | more.pop("tricks", {})
    run = az.Experiment(
        data="digits",
        clients=12,
        partition={"split": "classes", "classes_per_client": 4, "fraction": 0.4},
        model=more.pop("model", {"name": "small-cnn", "options": {"channels": [8, 16]}}),
        method=method,
        devices={"capacities": capacities, "clients_per_round": 3},
        training={"learning_rate": 0.05, "batch_size": 32, "clip": 5.0},
        tricks=tricks,
        rounds=2,
        evaluate_every=2,
        **more,
    ).run(out=out)
    return flatten(run.state)[0]


def same(left: Tensors, right: Tensors) -> bool:
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def bare(tensors: Tensors) -> Tensors:
    """Tensors by the network's own names, whichever method's state they come from."""
    return {name.rpartition("/")[2]: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("batch_norm", ["calibrated", "tracked"])
def test_heterofl_at_full_capacity_everywhere_is_fedavg_bit_for_bit(tmp_path: Path, batch_norm: str) -> None:
    tricks = {"batch_norm": batch_norm}
    ours = digits(HeteroFL(), [1.0], tmp_path / "heterofl", tricks=tricks)
    theirs = digits(FedAvg(), [1.0], tmp_path / "fedavg", tricks=tricks)
    assert same(bare(ours), bare(theirs))
    events = [az.load(tmp_path / name).history for name in ("heterofl", "fedavg")]
    for left, right in zip(*events):
        assert left.get("accuracy") == right.get("accuracy")
        assert left.get("train_loss") == right.get("train_loss")


def test_fedavg_each_at_one_width_is_fedavg_at_the_weakest(tmp_path: Path) -> None:
    each = digits(FedAvg(width="each"), [0.5], tmp_path / "each")
    weakest = digits(FedAvg(), [0.5], tmp_path / "weakest")
    assert same(each, weakest)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    return digits(HeteroFL(), [0.5, 1.0], tmp_path_factory.mktemp("plain") / "run", model="mlp")


@pytest.mark.parametrize("off", [{"proximal": 0.0, "proximal_form": "mean"}, {"server_momentum": 0.0}])
def test_a_trick_of_strength_zero_is_no_trick(plain: Tensors, tmp_path: Path, off: dict[str, Any]) -> None:
    assert same(plain, digits(HeteroFL(), [0.5, 1.0], tmp_path / "run", model="mlp", tricks=off))


@pytest.mark.parametrize(
    "on", [{"proximal": 0.1}, {"server_momentum": 0.5}, {"masked_loss": False}, {"classwise_head": False}]
)
def test_a_trick_that_is_on_changes_the_result(plain: Tensors, tmp_path: Path, on: dict[str, Any]) -> None:
    assert not same(plain, digits(HeteroFL(), [0.5, 1.0], tmp_path / "run", model="mlp", tricks=on))


# Learned starts


def learned() -> nn.Module:
    """A network whose every tensor, batch-norm statistics included, has been moved from where it started."""
    net = convolutional()
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=random) * 0.5 + 0.1)
    return net.eval()


def started(method: Method[Any], model: Any, **more: Any) -> tuple[Any, Any]:
    x = torch.randint(256, (40, 1, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    experiment = az.Experiment(
        data=az.Data(train=(x, torch.arange(40) % 4), test=(x, torch.arange(40) % 4)),
        clients=4,
        model=model,
        method=method,
        devices={"capacities": [0.5, 1.0]},
        tricks={"batch_norm": "tracked"},
        **more,
    )
    return experiment.context, method.init(experiment.context)


def outputs(network: nn.Module) -> Tensor:
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return network.eval()(x)


METHODS = [FedAvg(width="each"), HeteroFL()]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_a_learned_network_customised_at_full_size_is_that_network(method: Method[Any]) -> None:
    given = learned()
    context, state = started(method, copy.deepcopy(given), pretrained=True)
    network = method.customize(context, state, Size(1.0))
    assert same(tensors_of(given), tensors_of(network))
    assert torch.equal(outputs(given), outputs(network))


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_weights_from_a_file_customised_at_full_size_are_those_weights(method: Method[Any], tmp_path: Path) -> None:
    given = learned()
    safetensors.torch.save_file(tensors_of(given), tmp_path / "learned.safetensors")
    model = {"name": "anysize.testing:convolutional", "weights": str(tmp_path / "learned.safetensors")}
    context, state = started(method, model)
    assert context.pretrained
    network = method.customize(context, state, Size(1.0))
    assert torch.equal(outputs(given), outputs(network))


def test_flanc_starts_nearer_to_a_learned_network_the_larger_its_basis() -> None:
    given = learned()
    errors = []
    for size in (0.1, 0.5, 1.0):
        method = FLANC(basis_inputs=0.25, basis_size=size)
        context, state = started(method, copy.deepcopy(given), pretrained=True)
        network = method.customize(context, state, Size(1.0))
        errors.append((network[3].weight - given[3].weight).square().sum().item())
        assert torch.equal(network[0].weight, given[0].weight)  # the stem is not composed
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_a_full_basis_reproduces_any_weight(kernel: tuple[int, ...]) -> None:
    weight = torch.randn(6, 8, *kernel, generator=torch.Generator().manual_seed(1))
    inputs = 4
    basis = principal_basis(weight, inputs, inputs * weight[0, 0].numel())  # R2 = k^2 R1
    torch.testing.assert_close(compose(basis, project(weight, basis)), weight, rtol=1e-5, atol=1e-6)


def test_flanc_with_one_width_and_a_full_basis_starts_as_the_learned_network() -> None:
    given = learned()
    context, _ = started(FLANC(), copy.deepcopy(given), pretrained=True)
    state = FLANC().init(context)
    for name in state.basis:
        inputs = state.basis[name].shape[1]
        weight = given.get_parameter(name).detach()
        state.basis[name] = principal_basis(weight, inputs, inputs * weight[0, 0].numel())
        state.coefficients["1.0"][name] = project(weight, state.basis[name])
    network = FLANC().customize(context, state, Size(1.0))
    torch.testing.assert_close(outputs(network), outputs(given), rtol=1e-4, atol=1e-5)


def test_a_frozen_weight_is_no_methods_to_change(tmp_path: Path) -> None:
    given = learned()
    given[3].requires_grad_(False)
    for method in (FedAvg(width="each"), HeteroFL(), FLANC()):
        context, state = started(method, copy.deepcopy(given), pretrained=True)
        network = method.customize(context, state, Size(1.0))
        assert torch.equal(network[3].weight, given[3].weight)
