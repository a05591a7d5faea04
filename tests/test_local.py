"""The client's side: layout, batches, what a step receives, and the global generator left alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anysize as az
from anysize.client.batches import batches
from anysize.client.optimizer import optimizer_of, take_step
from anysize.client.work import perform
from anysize.config.tables import TrainingConfig
from anysize.elastic.fast import answering, layout
from anysize.elastic.norm import without_statistics
from anysize.methods import FedAvg, HeteroFL
from anysize.methods.messages import Client, ParameterGroup, SubModel
from anysize.methods.training import Batch, Step
from anysize.runs.runner import with_momentum
from anysize.testing import make_trial


@pytest.mark.parametrize("channels", [2, 4, 6, 8])
@pytest.mark.parametrize("stride", [2, 3])
def test_the_fast_layout_computes_what_the_plain_one_does(channels: int, stride: int) -> None:
    """At 2 to 6 channels the strided 1 x 1 convolution would corrupt memory in the fast layout."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 5, 1, stride=stride), nn.Flatten())
    fast = layout(copy.deepcopy(plain))
    for _ in range(20):
        x = torch.randn(16, 3, 10, 10)
        expected, found = plain(x), fast(x.contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for network, output in ((plain, expected), (fast, found)):
            network.zero_grad()
            output.square().sum().backward()
        for one, other in zip(plain.parameters(), fast.parameters()):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("padding", [0, 1])
def test_pooling_before_a_relu_gives_the_same_bits(padding: int) -> None:
    torch.manual_seed(0)
    parts = {
        "conv": nn.Conv2d(1, 6, 3),
        "relu": nn.ReLU(),
        "pool": nn.MaxPool2d(2, padding=padding),
        "end": nn.Flatten(),
    }
    plain = nn.Sequential()
    for name, part in parts.items():
        plain.add_module(name, part)
    plain = plain.to(memory_format=torch.channels_last)
    fast = layout(copy.deepcopy(plain))
    assert list(dict(fast.named_children())) == ["conv", "pool", "relu", "end"]
    x = torch.randn(8, 1, 9, 9).round().contiguous(memory_format=torch.channels_last)  # with ties
    x[0] = -x[0].abs() - 3  # windows of which nothing is left
    for network in (plain, fast):
        network(x).square().sum().backward()
    assert torch.equal(fast(x), plain(x))
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), fast.parameters()))


def test_a_container_with_its_own_way_through_is_left_alone() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.mean()

    plain = Twice(nn.ReLU(), nn.MaxPool2d(2))
    relu, pool = layout(plain)
    assert isinstance(relu, nn.ReLU)
    assert isinstance(pool, nn.MaxPool2d)


@pytest.mark.parametrize("sides", [(8, 6), (7, 6), (8, 9)])
@pytest.mark.parametrize("pool", [{}, {"stride": 1}, {"padding": 1}, {"ceil_mode": True}, {"dilation": 2}], ids=str)
def test_pooling_without_gradients_gives_the_same_bits(sides: tuple[int, int], pool: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.MaxPool2d(2, **pool)
    (fast,) = layout(nn.Sequential(copy.deepcopy(plain)))
    assert type(fast) is not type(plain)
    x = torch.randn(3, 5, *sides).round()  # with ties
    x[1, 2, 3, 3] = float("nan")
    for given in (x, x.contiguous(memory_format=torch.channels_last), x[0], x[:, :1]):
        with torch.no_grad():
            found = fast(given)
        torch.testing.assert_close(found, plain(given), rtol=0, atol=0, equal_nan=True)


def normed(factor: float) -> nn.Sequential:
    """A small network in evaluation mode with fixed statistics, whose first channel has this factor."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    norm = network[1]
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        nn.init.uniform_(tensor, 0.1, 2)
    with torch.no_grad():
        norm.weight[0] = factor
    return network.eval().to(memory_format=torch.channels_last)


@pytest.mark.parametrize("factor, pooled_first", [(1.0, True), (0.0, False), (-1.0, False)])
@pytest.mark.parametrize("side", [10, 9])
def test_an_answering_network_gives_the_same_bits(factor: float, pooled_first: bool, side: int) -> None:
    """A negative factor turns the order of values round, so its norm has to see them all."""
    plain = normed(factor)
    fast = answering(copy.deepcopy(plain))
    kinds = [type(part) for part in fast]
    assert (kinds.index(nn.BatchNorm2d) == 2) == pooled_first
    x = torch.randn(8, 1, side, side).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert torch.equal(fast(x), plain(x))


def test_a_norm_of_the_batch_sees_all_of_it() -> None:
    """Its statistics would be others after a pooling."""
    batchwise = without_statistics(normed(1.0))
    for network in (batchwise, normed(1.0).train()):
        assert isinstance(answering(network)[1], nn.BatchNorm2d)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_is_torchs_own_fused_one_bit_for_bit(momentum: float) -> None:
    """Also for parameters of another precision, and for one that some batches do not use."""
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(5), torch.randn(2, dtype=torch.float64)]
    ours, theirs = ([nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    training = TrainingConfig(momentum=momentum, weight_decay=1e-2)
    groups = [ParameterGroup(tuple(ours[:1]), rate=0.5), ParameterGroup(tuple(ours[1:]), decay=0.0)]
    optimizer = optimizer_of(training, groups, 0.1)
    options = [{"params": theirs[:1], "lr": 0.05, "weight_decay": 1e-2}, {"params": theirs[1:]}]
    plain = torch.optim.SGD(options, lr=0.1, momentum=momentum, fused=True)
    for number in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        assert all(parameter.grad is None for parameter in ours)
        for parameters in (ours, theirs):
            used = parameters[:2] if number == 2 else parameters
            sum((parameter.square() * (number + 1)).sum() for parameter in used).backward()
        take_step(optimizer)
        plain.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs))


@pytest.mark.parametrize("samples, size", [(1, 4), (2, 1), (5, 2), (9, 4), (8, 4), (33, 32)])
def test_batches_hold_every_sample_and_never_a_single_one(samples: int, size: int) -> None:
    parts = batches(torch.arange(samples), size)
    assert min(len(part) for part in parts) >= 2
    assert sorted(set(torch.cat(parts).tolist())) == list(range(samples))
    assert samples == 1 or len(torch.cat(parts)) == samples


def _message(trial: object, task: str = "train") -> SubModel:
    client = Client(0, 0, trial.context.largest, 1, 12, 0)  # type: ignore[attr-defined]
    message = trial.method.extract(trial.context, trial.state, client)  # type: ignore[attr-defined]
    return replace(message, ticket=replace(message.ticket, job=task, rate=0.05))


def test_calibration_takes_a_share_whose_last_batch_is_one_sample() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    trial = make_trial(HeteroFL(), network, (0.5, 1.0), None)
    x = torch.randint(256, (9, 1, 8, 8), dtype=torch.uint8)  # a batch of 8 and one of 1
    share = az.Share(train=(x, torch.arange(9) % 4))
    update = perform(trial.context, trial.method, _message(trial, "calibrate"), share)
    entering = network[1](x.flatten(1).float() / 255).detach().double().numpy()
    np.testing.assert_allclose(update.tensors["0.mean"], entering.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(update.tensors["0.variance"], entering.var(0), rtol=1e-4, atol=1e-5)
    assert update.tensors["0.count"] == 9


@dataclass(frozen=True)
class Anchored(FedAvg):
    """Notes how far each step starts from what was received."""

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        far = sum(float((p.detach() - step.received[n]).abs().max()) for n, p in module.named_parameters())
        DISTANCES.append((step.number, far))
        return super().loss(module, batch, step)


DISTANCES: list[tuple[int, float]] = []


def test_a_step_knows_the_tensors_as_they_were_received() -> None:
    trial = make_trial(Anchored(), None, (1.0,), None)
    share = trial.experiment.shares.share(0)
    for _ in range(2):  # the second time the network is used again
        DISTANCES.clear()
        perform(trial.context, trial.method, _message(trial), share)
        assert DISTANCES[0] == (0, 0.0)
        assert all(far > 0 for number, far in DISTANCES if number > 0)


def test_dropout_is_the_clients_own_and_the_global_generator_is_left_alone() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
    trial = make_trial(FedAvg(), network, (1.0,), None)
    share = trial.experiment.shares.share(0)
    before = torch.get_rng_state()
    first = perform(trial.context, trial.method, _message(trial), share)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    second = perform(trial.context, trial.method, _message(trial), share)
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name])


def test_server_momentum_leaves_running_statistics_alone() -> None:
    @dataclass(frozen=True)
    class State:
        tensors: dict[str, Tensor]

    before = State({"w": torch.tensor([1.0]), "norm.running_var": torch.tensor([1.0])})
    after = State({"w": torch.tensor([3.0]), "norm.running_var": torch.tensor([0.1])})
    old = {"tensors/w": torch.tensor([1.0])}
    stepped, moved = with_momentum(before, after, old, 0.5, {"norm.running_var"})
    assert stepped.tensors["w"].item() == pytest.approx(1.0 + 0.5 * 1.0 + 2.0)
    assert stepped.tensors["norm.running_var"].item() == pytest.approx(0.1)
    assert list(moved) == ["tensors/w"]
