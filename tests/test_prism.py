"""PriSM, FedHM and OrigDrop on cases small enough to compute with numpy, and the settings of PriSM's paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anysize as az
from anysize import report
from anysize.cli.printing import statistics_lines
from anysize.client.optimizer import make_optimizer
from anysize.client.work import perform
from anysize.config import from_dict
from anysize.data import Data, Share, to_input
from anysize.elastic.basis import key
from anysize.elastic.kernels import Factorised, Pair, principal_kernels, rank
from anysize.elastic.norm import Statistics, batch_norms, collect, put_together, without_statistics
from anysize.elastic.skeleton import tensors_of
from anysize.engines.inprocess import InProcess
from anysize.errors import ConfigError, MethodError
from anysize.experiment.estimating import jobs, whole
from anysize.experiment.experiment import evaluation_part
from anysize.experiment.plan import plan
from anysize.methods import Client, FedAvg, FedHM, Method, OrigDrop, PriSM, Update
from anysize.methods.context import Context
from anysize.methods.factorising import inner_weights
from anysize.methods.messages import SubModel
from anysize.methods.prism import drawn, refreshed, windows
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.models.attention import vit_tiny
from anysize.rng import generator
from anysize.runs.experiment import Experiment
from anysize.runs.run import Run
from anysize.server.calibration import untrained
from anysize.wire import flatten, size_bytes

KEEPS = [0.2, 0.4, 0.6, 0.8]
WINDOWS = PriSM(channels="windows")


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Module:
    """6 inputs, two hidden layers of 8, 3 classes; the middle weight is the one that is decomposed."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def context_of(method: Method[Any], capacities: list[float], model: Any = None, **more: Any) -> Context:
    x, y = numbers(0, 12, 6), torch.arange(12) % 3
    return Experiment(
        data=Data(train=(x, y), test=(x, y)),
        clients=4,
        model=model or network(),
        method=method,
        devices={"capacities": capacities},
        **more,
    ).context


def answers(context: Context, method: Method[Any], state: Any, widths: list[float]) -> list[Update]:
    """What clients send that replaced each tensor by random numbers."""
    updates = []
    for i, width in enumerate(widths):
        message = method.extract(context, state, Client(i, i, Size(width), 1, 5, 0))
        tensors = {n: numbers(100 * i + j, *t.shape) for j, (n, t) in enumerate(sorted(message.tensors.items()))}
        updates.append(Update(tensors, message.ticket, samples=5 * i + 1, loss=0.0))
    return updates


# PriSM


def test_a_sub_model_is_the_drawn_kernels_at_the_first_channels() -> None:
    method = PriSM(kappa=1.0, channels="first", dropped="kept")
    context = context_of(method, [0.5])
    state = method.init(context)
    message = method.extract(context, state, Client(3, 0, Size(0.5), 7, 5, 0))
    chosen = drawn(state, 0.5, generator(0, 7, 3, "kernels"), "importance", 1.0)["2.weight"]
    assert len(chosen) == 4
    weight = context.start()["2.weight"].numpy()
    left, values, right = np.linalg.svd(weight)
    sent = message.tensors["left.2:weight"].numpy() @ message.tensors["right.2:weight"].numpy()
    kernels = [values[i] * np.outer(left[:4, i], right[i, :4]) for i in chosen.tolist()]
    np.testing.assert_allclose(sent, sum(kernels), atol=1e-5)
    assert {n: tuple(t.shape) for n, t in message.tensors.items()} == {
        "left.2:weight": (4, 4),
        "right.2:weight": (4, 4),
        "network.0.weight": (4, 6),
        "network.0.bias": (4,),
        "network.2.bias": (4,),
        "network.4.weight": (3, 4),
        "network.4.bias": (3,),
    }
    built = method.build(context.for_client(), message)
    assert isinstance(built, Factorised)
    assert isinstance(built.network[2], Pair)
    assert max(parameter.numel() for parameter in built.parameters()) == 24


def test_every_entry_of_a_kernel_is_averaged_over_the_clients_that_had_it() -> None:
    method = PriSM(refresh_every=2, channels="first", dropped="kept")
    context = context_of(method, [0.25, 0.5])
    state = method.init(context)
    widths = [0.5, 0.25, 0.5, 0.25]
    updates = answers(context, method, state, widths)
    after = method.aggregate(context, state, iter(updates))
    left, right = np.zeros((8, 8)), np.zeros((8, 8))
    left_seen, right_seen, had = np.zeros((8, 8)), np.zeros((8, 8)), np.zeros(8, int)
    for i, (width, update) in enumerate(zip(widths, updates)):
        chosen = drawn(state, width, generator(0, 1, i, "kernels"), "importance", 2.5)["2.weight"].numpy()
        rows = np.arange(int(8 * width))
        left[np.ix_(rows, chosen)] += update.tensors["left.2:weight"].numpy()
        right[np.ix_(chosen, rows)] += update.tensors["right.2:weight"].numpy()
        left_seen[np.ix_(rows, chosen)] += 1
        right_seen[np.ix_(chosen, rows)] += 1
        had[chosen] += 1
    for mean, seen, now, old in (
        (left, left_seen, after.left, state.left),
        (right, right_seen, after.right, state.right),
    ):
        expected = np.where(seen > 0, mean / np.maximum(seen, 1), old["2.weight"].numpy())
        np.testing.assert_allclose(now["2.weight"], expected, atol=1e-6)
    assert after.draws["2.weight"].tolist() == had.tolist()
    norms = np.linalg.norm(after.left["2.weight"], axis=0) * np.linalg.norm(after.right["2.weight"], axis=1)
    np.testing.assert_allclose(after.values["2.weight"], norms, rtol=1e-5)


def test_the_refresh_gives_orthogonal_kernels_of_the_same_weight() -> None:
    context = context_of(WINDOWS, [0.5])
    state = WINDOWS.init(context)
    updates = answers(context, WINDOWS, state, [0.5, 0.5, 0.5])
    raw = PriSM(channels="windows", refresh_every=9).aggregate(context, state, iter(updates))
    fresh = WINDOWS.aggregate(context, state, iter(updates))
    product = raw.left["2.weight"] @ raw.right["2.weight"]
    np.testing.assert_allclose(fresh.left["2.weight"] @ fresh.right["2.weight"], product, atol=1e-5)
    values = np.linalg.svd(product.numpy(), compute_uv=False)
    np.testing.assert_allclose(fresh.values["2.weight"], values, atol=1e-5)
    gram = fresh.left["2.weight"].T @ fresh.left["2.weight"]
    np.testing.assert_allclose(gram, np.diag(values), atol=1e-4)


def test_the_refresh_comes_every_so_many_rounds() -> None:
    method = PriSM(refresh_every=2)
    context = context_of(method, [0.5])
    state = method.init(context)
    after = method.aggregate(context, state, iter(answers(context, method, state, [0.5])))
    gram = after.left["2.weight"].T @ after.left["2.weight"]
    assert float((gram - gram.diag().diag()).abs().max()) > 0.1
    second = method.aggregate(context, after, iter(answers(context, method, after, [0.5])))
    gram = second.left["2.weight"].T @ second.left["2.weight"]
    assert float((gram - gram.diag().diag()).abs().max()) < 1e-4
    assert second.rounds == 2


def test_what_nobody_drew_stays_as_it_was() -> None:
    method = PriSM(sampling="top", refresh_every=9, channels="first", dropped="kept")
    context = context_of(method, [0.25])
    state = method.init(context)
    after = method.aggregate(context, state, iter(answers(context, method, state, [0.25, 0.25])))
    assert torch.equal(after.left["2.weight"][2:], state.left["2.weight"][2:])
    assert torch.equal(after.left["2.weight"][:, 2:], state.left["2.weight"][:, 2:])
    assert torch.equal(after.right["2.weight"][2:], state.right["2.weight"][2:])
    assert torch.equal(after.rest["4.weight"][:, 2:], state.rest["4.weight"][:, 2:])
    assert not torch.equal(after.left["2.weight"][:2, :2], state.left["2.weight"][:2, :2])


def test_the_loss_has_the_decay_of_the_product_and_the_factors_have_none_of_their_own() -> None:
    method = PriSM(frobenius=3.0)
    context = context_of(method, [0.5], training={"weight_decay": 0.02})
    message = method.extract(context, method.init(context), Client(0, 0, Size(0.5), 1, 5, 0))
    module = method.build(context, message)
    step = Step(0, torch.Generator(), {}, lambda net, batch: net(batch.x).sum())
    batch = Batch(numbers(1, 4, 6), torch.zeros(4))
    product = message.tensors["left.2:weight"] @ message.tensors["right.2:weight"]
    expected = float(module(batch.x).detach().sum()) + 0.5 * 3.0 * 0.02 * float(product.square().sum())
    assert float(method.loss(module, batch, step).detach()) == pytest.approx(expected, rel=1e-5)
    dense, factors = make_optimizer(context, method, module, 0.1).param_groups
    assert dense["weight_decay"] == 0.02
    assert factors["weight_decay"] == 0
    assert sorted(tuple(p.shape) for p in factors["params"]) == [(4, 4), (4, 4)]


def test_the_full_network_is_the_sum_of_all_kernels_and_a_small_one_of_its_first() -> None:
    method = PriSM(channels="first", dropped="kept")
    context = context_of(method, [0.5])
    state = method.init(context)
    assert [size.label for size in method.sizes(context)] == ["0.5", "1.0"]
    full = tensors_of(method.customize(context, state, Size(1.0)))
    for name, tensor in context.start().items():
        np.testing.assert_allclose(full[name], tensor, atol=1e-6)
    small = tensors_of(method.customize(context, state, Size(0.5)))
    left, values, right = np.linalg.svd(context.start()["2.weight"].numpy())
    np.testing.assert_allclose(small["2.weight"], (left[:4, :4] * values[:4]) @ right[:4, :4], atol=1e-5)
    assert torch.equal(small["4.weight"], context.start()["4.weight"][:, :4])


@pytest.mark.parametrize("dropped", ["zero", "kept"])
def test_a_full_network_without_what_nobody_trained_is_all_kernels_at_the_first_channels(dropped: Any) -> None:
    method = PriSM(dropped=dropped)
    context = context_of(method, [0.25, 0.5])
    state = method.init(context)
    state = method.aggregate(context, state, iter(answers(context, method, state, [0.25, 0.5])))
    tensors = {"2.weight": state.left["2.weight"] @ state.right["2.weight"], **state.rest}
    first = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    first.load_state_dict({n: tensors[n][tuple(map(slice, t.shape))] for n, t in first.state_dict().items()})
    full = method.customize(context, state, Size(1.0))
    x = numbers(5, 4, 6)
    assert torch.allclose(full(x), first(x), atol=1e-5) == (dropped == "zero")
    message = method.extract(context, state, Client(0, 0, Size(1.0), 1, 5, 0, "evaluate"))
    message = replace(message, ticket=replace(message.ticket, job="evaluate"))
    torch.testing.assert_close(method.build(context.for_client(), message)(x), full(x))


def test_a_step_at_keep_one_is_the_dense_gradient_through_both_factors() -> None:
    method, rate = PriSM(), 0.1
    training = {"momentum": 0.0, "weight_decay": 0.0}
    context = context_of(method, [1.0], training=training)
    state = method.init(context)
    message = method.extract(context, state, Client(0, 0, Size(1.0), 1, 5, 0))
    module, dense = method.build(context, message), network()
    dense.load_state_dict(dict(context.start()))
    batch = Batch(numbers(1, 4, 6), torch.zeros(4))
    torch.testing.assert_close(module(batch.x), dense(batch.x), rtol=1e-4, atol=1e-5)
    dense(batch.x).square().sum().backward()
    step = Step(0, torch.Generator(), {}, lambda net, batch: net(batch.x).square().sum())
    optimizer = make_optimizer(context, method, module, rate)
    method.loss(module, batch, step).backward()
    optimizer.step()
    update = method.pack(module, message)
    after = method.aggregate(context, state, iter([replace(update, samples=5, loss=0.0)]))
    slope = dense[2].weight.grad.double().numpy()
    left, right = (side["2.weight"].double().numpy() for side in (state.left, state.right))
    expected = (left - rate * slope @ right.T) @ (right - rate * left.T @ slope)
    np.testing.assert_allclose(after.left["2.weight"] @ after.right["2.weight"], expected, atol=1e-4)
    plain = (dense[0].weight - rate * dense[0].weight.grad).detach()
    np.testing.assert_allclose(after.rest["0.weight"], plain, atol=1e-5)


def test_every_client_gets_all_of_a_weight_whose_rank_it_can_hold() -> None:
    method = PriSM(channels="first", dropped="kept")
    context = context_of(method, [0.5])
    state = method.init(context)
    low = numbers(7, 8, 4) @ numbers(8, 4, 8)
    kernels = principal_kernels(low)
    sides = {name: {"2.weight": own} for name, own in kernels._asdict().items()}
    state = replace(state, **sides)
    for client in range(5):
        message = method.extract(context, state, Client(client, 0, Size(0.5), 1, 5, 0))
        sent = message.tensors["left.2:weight"] @ message.tensors["right.2:weight"]
        np.testing.assert_allclose(sent, low[:4, :4], atol=1e-3)


def test_drawn_channels_reach_all_of_them_and_differ_between_clients() -> None:
    method = PriSM(channels="drawn", refresh_every=9)
    context = context_of(method, [0.25])
    state = method.init(context)
    after = method.aggregate(context, state, iter(answers(context, method, state, [0.25] * 24)))
    trained = (after.rest["4.weight"] != state.rest["4.weight"]).all(0)
    assert trained.all()
    fixed = PriSM(channels="first", dropped="kept", refresh_every=9)
    first = fixed.aggregate(context, state, iter(answers(context, fixed, state, [0.25] * 24)))
    assert (first.rest["4.weight"] != state.rest["4.weight"]).all(0).tolist() == [True] * 2 + [False] * 6


def test_all_channels_are_computed_with_a_part_of_the_kernels() -> None:
    method = PriSM(channels="all", sampling="top", refresh_every=9)
    context = context_of(method, [0.25])
    state = method.init(context)
    message = method.extract(context, state, Client(0, 0, Size(0.25), 1, 5, 0))
    left, values, right = np.linalg.svd(context.start()["2.weight"].numpy())
    sent = message.tensors["left.2:weight"].numpy() @ message.tensors["right.2:weight"].numpy()
    np.testing.assert_allclose(sent, (left[:, :2] * values[:2]) @ right[:2], atol=1e-5)
    assert method.build(context.for_client(), message)(numbers(1, 4, 6)).shape == (4, 3)
    after = method.aggregate(context, state, iter(answers(context, method, state, [0.25, 0.25])))
    assert (after.left["2.weight"][:, :2] != state.left["2.weight"][:, :2]).all()
    assert torch.equal(after.left["2.weight"][:, 2:], state.left["2.weight"][:, 2:])
    small = tensors_of(method.customize(context, state, Size(0.25)))
    np.testing.assert_allclose(small["2.weight"], sent, atol=1e-5)
    assert torch.equal(small["4.weight"], context.start()["4.weight"])


def test_zeros_where_nobody_trains_leave_every_client_all_kernels_of_the_trained_block() -> None:
    method = PriSM(kappa=4.0)
    context = context_of(method, [0.5])
    state = method.init(context)
    block = context.start()["2.weight"][:4, :4].numpy()
    assert np.linalg.matrix_rank(block) == 4
    np.testing.assert_allclose(state.values["2.weight"][:4], np.linalg.svd(block, compute_uv=False), atol=1e-5)
    for client in range(3):
        message = method.extract(context, state, Client(client, 0, Size(0.5), 1, 5, 0))
        sent = message.tensors["left.2:weight"] @ message.tensors["right.2:weight"]
        np.testing.assert_allclose(sent, block, atol=1e-4)


# Averaged momentum

MOMENTUM = {"momentum": 0.9, "weight_decay": 0.0}


def gradient_of(state: Any, slope: Tensor) -> dict[str, dict[str, Tensor]]:
    """The momentum that every client would have if a weight's gradient were always `slope`."""
    left, right = state.left["2.weight"], state.right["2.weight"]
    own = {"left": {"2.weight": slope @ right.T}, "right": {"2.weight": left.T @ slope}}
    return {**state.momentum, **own}


def test_momentum_is_averaged_over_the_clients_that_had_the_entry_and_given_to_the_next() -> None:
    method = PriSM(momentum="averaged", sampling="top", channels="first", dropped="kept", refresh_every=9)
    context = context_of(method, [0.25, 0.5], training=MOMENTUM)
    state = method.init(context)
    updates = answers(context, method, state, [0.5, 0.25])
    after = method.aggregate(context, state, iter(updates))
    large, small = (update.tensors["momentum.left:2%3Aweight"].numpy() for update in updates)
    expected = np.zeros((8, 8))
    expected[:4, :4] = large
    expected[:2, :2] = (large[:2, :2] + small) / 2
    np.testing.assert_allclose(after.momentum["left"]["2.weight"], expected, atol=1e-6)
    heads = [update.tensors["momentum.network:4:weight"].numpy() for update in updates]
    expected = np.zeros((3, 8))
    expected[:, :4] = heads[0]
    expected[:, :2] = (heads[0][:, :2] + heads[1]) / 2
    np.testing.assert_allclose(after.momentum["network"]["4.weight"], expected, atol=1e-6)
    message = method.extract(context, after, Client(5, 0, Size(0.25), 2, 5, 0))
    assert torch.equal(
        message.tensors["momentum.left:2%3Aweight"],
        after.momentum["left"]["2.weight"][:2, drawn(after, 0.25, torch.Generator(), "top", 1.0)["2.weight"]],
    )
    finished = method.extract(context, after, Client(5, 0, Size(0.25), 2, 5, 0, "evaluate"))
    assert not any(name.startswith("momentum") for name in finished.tensors)


def test_a_refresh_turns_momentum_into_that_of_the_same_gradient_in_the_new_kernels() -> None:
    method = PriSM(momentum="averaged")
    context = context_of(method, [1.0], training=MOMENTUM)
    state = method.init(context)
    raw = replace(state, left={"2.weight": numbers(1, 8, 8)}, right={"2.weight": numbers(2, 8, 8)})
    slope = numbers(3, 8, 8)
    fresh = refreshed(replace(raw, momentum=gradient_of(raw, slope)), state)
    for side, expected in gradient_of(fresh, slope).items():
        for name, tensor in expected.items():
            np.testing.assert_allclose(fresh.momentum[side][name], tensor, rtol=1e-3, atol=1e-3)


def test_a_client_begins_with_the_momentum_that_it_was_given_and_sends_where_it_ended() -> None:
    method = PriSM(momentum="averaged", frobenius=0.0)
    training = MOMENTUM | {"batch_size": 8, "local_epochs": 2, "learning_rate": 0.1}
    context = context_of(method, [0.5], training=training)
    state = method.init(context)
    given = {
        side: {name: numbers(i + len(name), *t.shape) for i, (name, t) in enumerate(own.items())}
        for side, own in state.momentum.items()
    }
    message = method.extract(context, replace(state, momentum=given), Client(0, 0, Size(0.5), 1, 8, 0))
    message = replace(message, ticket=replace(message.ticket, rate=0.1))
    x, y = numbers(4, 8, 6), torch.arange(8) % 3
    update = perform(context.for_client(), method, message, Share((x, y)))
    net = method.build(context, message)
    parameters = {name: p for name, p in net.named_parameters() if not name.startswith("momentum")}
    buffers = {name: message.tensors[f"momentum.{key(name)}"].clone() for name in parameters}
    for _ in range(2):  # each epoch is one batch of all samples
        loss = nn.functional.cross_entropy(net(x), y)
        slopes = torch.autograd.grad(loss, list(parameters.values()))
        with torch.no_grad():
            for (name, parameter), slope in zip(parameters.items(), slopes):
                buffers[name] = 0.9 * buffers[name] + slope
                parameter -= 0.1 * buffers[name]
    for name, parameter in parameters.items():
        torch.testing.assert_close(update.tensors[name], parameter.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(update.tensors[f"momentum.{key(name)}"], buffers[name], rtol=1e-4, atol=1e-5)


def test_averaged_momentum_is_counted_in_bytes_and_refused_where_there_is_none(tmp_path: Path) -> None:
    def total(momentum: Any) -> int:
        run = constrained(PriSM(momentum=momentum), [0.4], tmp_path / momentum, rounds=1, training={"local_steps": 1})
        assert run.history[0]["bytes_up"] > 0
        return int(run.history[0]["bytes_up"])

    assert 1.7 < total("averaged") / total("local") < 2.1
    context = context_of(PriSM(), [0.5], training={"momentum": 0.0, "stack": 4}, tricks={"batch_norm": "local"})
    with pytest.raises(MethodError, match=r"training\.momentum above 0.*training\.stack = 4.*batch_norm = \"local\""):
        PriSM(momentum="averaged").init(context)


class Gated(nn.Module):
    """An LSTM between an embedding and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x).unsqueeze(1))[0][:, -1])


def test_recurrent_rows_are_left_out_gate_by_gate() -> None:
    method = PriSM(sampling="top", channels="first", dropped="kept")
    context = context_of(method, [0.5], Gated())
    state = method.init(context)
    message = method.extract(context, state, Client(0, 0, Size(0.5), 1, 5, 0))
    rows = [gate * 12 + unit for gate in range(4) for unit in range(6)]
    full = state.left["lstm.weight_ih_l0"]
    assert tuple(full.shape) == (48, 8)
    assert torch.equal(message.tensors["left.lstm:weight_ih_l0"], full[rows][:, :4])
    assert tuple(message.tensors["right.lstm:weight_hh_l0"].shape) == (6, 6)
    built = method.build(context.for_client(), message)
    small = method.customize(context, state, Size(0.5))
    x = numbers(3, 4, 6)
    torch.testing.assert_close(built(x), small(x))


def test_the_report_gets_needed_kernels_values_and_draws() -> None:
    method = PriSM(sampling="top", channels="first", dropped="kept")
    context = context_of(method, [0.5])
    state = method.init(context)
    state = method.aggregate(context, state, iter(answers(context, method, state, [0.5, 0.5])))
    found = method.describe(context, state)
    assert set(found) == {f"{kind}/2.weight" for kind in ("needed_kernels", "participating_kernels", "kernel_draws")}
    values, draws = found["kernel_draws/2.weight"].double().numpy()
    assert draws.tolist() == [2.0] * 4 + [0.0] * 4
    shares = values / values.sum()
    needed = float(np.exp(-(shares * np.log(shares)).sum()))
    assert found["needed_kernels/2.weight"].tolist() == pytest.approx([needed, 8.0], rel=1e-4)
    assert float(found["participating_kernels/2.weight"]) == pytest.approx(1 / (shares**2).sum(), rel=1e-4)


def columns(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The im2col of a 3 x 3 convolution with padding 1: images (B, M, h, w) as the matrix (9 M, B h w)."""
    padded = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = image.shape[2:]
    places = [padded[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return np.stack(places, 2).transpose(1, 2, 0, 3, 4).reshape(9 * image.shape[1], -1)


@pytest.mark.parametrize("refresh_every", [1, 2])
def test_the_report_gets_features_their_overlap_and_the_ranks_of_what_kernels_give(refresh_every: int) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1), nn.Flatten())
    x = numbers(1, 5, 2, 4, 4)
    method = PriSM(channels="all", refresh_every=refresh_every)
    context = Experiment(
        data=Data(train=(x, torch.arange(5) % 3)),
        clients=2,
        model=nn.Sequential(*model, nn.Linear(96, 3)),
        method=method,
        devices={"capacities": [0.5]},
    ).context
    state = method.init(context)
    state = method.aggregate(context, state, iter(answers(context, method, state, [0.5, 0.5])))
    found = {name: tensor.double().numpy() for name, tensor in method.observe(context, state, x).items()}

    first = {name: tensor.double().numpy() for name, tensor in state.rest.items()}
    hidden = first["0.weight"].reshape(4, -1) @ columns(x.double().numpy()) + first["0.bias"][:, None]
    hidden = np.maximum(hidden, 0).reshape(4, 5, 4, 4).transpose(1, 0, 2, 3)
    entered = columns(hidden)  # (36, 80)
    left = state.left["2.weight"].double().numpy().reshape(6, -1)
    right = state.right["2.weight"].double().numpy().reshape(-1, 36)
    every = [np.outer(left[:, i], right[i] @ entered) for i in range(6)]
    norms = [np.linalg.norm(own) for own in every]
    cosines = [abs((every[i] * every[j]).sum()) / norms[i] / norms[j] for i in range(6) for j in range(i)]
    assert float(found["feature_overlap/2.weight"]) == pytest.approx(max(cosines), abs=1e-4)
    assert (max(cosines) < 1e-4) == (refresh_every == 1)

    order = np.argsort(-state.values["2.weight"].numpy())
    for row, (keep, count) in zip(found["feature_rank/2.weight"], [(0.5, 3), (1.0, 6)]):
        top = order[:count]
        made, outputs = right[top] @ entered, left[:, top] @ right[top] @ entered
        spectrum = np.linalg.svd(outputs, compute_uv=False)
        shares = spectrum[spectrum > 1e-9 * spectrum[0]] / spectrum.sum()
        needed = np.exp(-(shares * np.log(shares)).sum())
        expected = [np.linalg.matrix_rank(own, rtol=1e-6) for own in (made, left[:, top], outputs)]
        assert row.tolist() == pytest.approx([keep, count, 6, *expected, needed], rel=1e-4)
        assert expected[2] <= count  # Eq. (4)

    np.testing.assert_allclose(found["kernel_features/2-input"], x[0].mean(0), atol=1e-6)
    for place, kernel in enumerate(order[:3], 1):
        picture = np.linalg.norm(left[:, kernel]) * (right[kernel] @ columns(hidden[:1])).reshape(4, 4)
        np.testing.assert_allclose(found[f"kernel_features/2-kernel-{place}"], picture, atol=1e-4)


def test_a_run_writes_what_its_kernels_make_of_test_samples_and_the_report_draws_it(tmp_path: Path) -> None:
    made = Experiment(
        data="digits",
        clients=4,
        model={"name": "small-cnn", "options": {"channels": [4, 8]}},
        method=PriSM(),
        devices={"capacities": [0.5], "participation": 0.5},
        engine={"name": "inprocess"},
        partition={"fraction": 0.1},
        rounds=1,
    )
    run = made.run(tmp_path / "run")
    report.write(run.directory)
    names = sorted(path.name for path in (run.directory / "report").glob("analysis-*.csv"))
    layer = next(name for name in names if name.endswith("-input.csv")).split("-")[-2]
    assert {"analysis-feature_overlap.csv", "analysis-feature_rank.csv"} <= set(names)
    assert f"analysis-kernel_features-{layer}-kernel-3.csv" in names
    lines = (run.directory / "report" / "analysis-feature_rank.csv").read_text().splitlines()
    assert lines[0] == "round,layer,keep,kernels,channels,rank_maps,rank_kernels,rank_outputs,needed"
    assert [line.split(",")[2] for line in lines[1:]] == ["0.5", "1.0"]


def test_wrong_options_are_listed_at_once() -> None:
    with pytest.raises(
        MethodError,
        match=r"kappa = -1.*sampling = 'best'.*channels = 'last'.*refresh_every = 0.*dropped = 'half'.*momentum = 'no'",
    ):
        PriSM(-1, "best", "last", 0, dropped="half", momentum="no")  # type: ignore[arg-type]
    with pytest.raises(MethodError, match=r"reshape = 'cube'.*frobenius = -1"):
        FedHM(reshape="cube", frobenius=-1)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="dropped = 'half'"):
        OrigDrop(dropped="half")  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="server_momentum"):
        PriSM().init(context_of(PriSM(), [0.5], tricks={"server_momentum": 0.5}))
    with pytest.raises(ConfigError, match=r"method\.kappa = 'high'"):
        az.methods.make("prism", {"kappa": "high"})


# FedHM and OrigDrop


@pytest.mark.parametrize("pseudo", [False, True])
def test_fedhm_averages_the_products_and_counts_the_server_where_nobody_is_whole(pseudo: bool) -> None:
    method = FedHM(pseudo_client=pseudo)
    context = context_of(method, [0.25, 0.5, 1.0])
    state = method.init(context)
    for widths in ([0.25, 0.5], [0.25, 1.0]):
        updates = answers(context, method, state, widths)
        made = []
        for update in updates:
            whole = update.tensors.get("network.2.weight")
            product = whole if whole is not None else update.tensors["left.2:weight"] @ update.tensors["right.2:weight"]
            made.append(product.numpy())
        if pseudo and 1.0 not in widths:
            made.append(context.start()["2.weight"].numpy())
        after = method.aggregate(context, state, iter(updates))
        np.testing.assert_allclose(after.tensors["2.weight"], np.mean(made, axis=0), atol=1e-5)
        left, values, right = np.linalg.svd(after.tensors["2.weight"].numpy())
        np.testing.assert_allclose(
            after.left["2.weight"] @ after.right["2.weight"], (left[:, :4] * values[:4]) @ right[:4], atol=1e-4
        )


def test_fedhm_sends_the_top_kernels_at_all_channels() -> None:
    method = FedHM()
    context = context_of(method, [0.25, 0.5])
    state = method.init(context)
    message = method.extract(context, state, Client(0, 0, Size(0.25), 1, 5, 0))
    left, values, right = np.linalg.svd(context.start()["2.weight"].numpy())
    sent = message.tensors["left.2:weight"] @ message.tensors["right.2:weight"]
    np.testing.assert_allclose(sent, (left[:, :2] * values[:2]) @ right[:2], atol=1e-5)
    assert tuple(message.tensors["network.0.weight"].shape) == (8, 6)
    small = tensors_of(method.customize(context, state, Size(0.25)))
    np.testing.assert_allclose(small["2.weight"], sent, atol=1e-6)
    with pytest.raises(MethodError, match=r"size 0\.7 was asked for"):
        method.customize(context, state, Size(0.7))


def test_factors_of_other_shapes_are_refused_even_where_their_product_fits() -> None:
    method = FedHM()
    context = context_of(method, [0.25, 0.5])
    state = method.init(context)
    (update,) = answers(context, method, state, [0.25])
    wide = update.tensors | {"left.2:weight": numbers(1, 8, 3), "right.2:weight": numbers(2, 3, 8)}
    with pytest.raises(MethodError, match="factors of other shapes"):
        method.aggregate(context, state, iter([replace(update, tensors=wide)]))


@pytest.mark.parametrize("dropped", ["zero", "kept"])
def test_origdrop_leaves_zero_or_the_start_where_nobody_trains(dropped: Any) -> None:
    method = OrigDrop(dropped=dropped)
    context = context_of(method, [0.25, 0.5])
    state = method.init(context)
    updates = answers(context, method, state, [0.25, 0.5])
    state = method.aggregate(context, state, iter(updates))
    full = tensors_of(method.customize(context, state, Size(1.0)))
    expected = np.zeros((8, 8), np.float32) if dropped == "zero" else context.start()["2.weight"].numpy().copy()
    expected[:4, :4] = updates[1].tensors["2.weight"]
    expected[:2, :2] = (updates[0].tensors["2.weight"] + updates[1].tensors["2.weight"][:2, :2]) / 2
    np.testing.assert_allclose(full["2.weight"], expected, atol=1e-6)
    if dropped == "zero":
        x = numbers(5, 4, 6)
        small, large = (method.customize(context, state, Size(width)) for width in (0.5, 1.0))
        torch.testing.assert_close(small(x), large(x))


@pytest.mark.parametrize("method", [FedHM(), OrigDrop()])
def test_with_everybody_whole_the_baselines_are_fedavg_bit_for_bit(method: Method[Any], tmp_path: Path) -> None:
    def state(own: Method[Any]) -> dict[str, Tensor]:
        run = constrained(
            own, [1.0], tmp_path / type(own).__name__, rounds=2, tricks={"batch_norm": "batch", "weighting": "clients"}
        )
        return {name.rpartition("/")[2]: tensor for name, tensor in flatten(run.state)[0].items()}

    ours, theirs = state(method), state(FedAvg())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Settings


def constrained(method: Any, capacities: list[float], out: Path, **more: Any) -> az.Run:
    """A run on digits in which nobody may be able to train the full network."""
    tables: dict[str, Any] = {
        "data": "digits",
        "clients": 10,
        "model": {"name": "small-cnn", "options": {"channels": [8, 16]}},
        "devices": {"capacities": capacities},
        "training": {"learning_rate": 0.05, "batch_size": 16, "local_epochs": 2, "schedule": "cosine"},
        "engine": {"name": "inprocess"},
        "rounds": 6,
        "evaluate_every": 100,
    }
    return az.Experiment(method=method, **{**tables, **more}).run(out)


@pytest.mark.parametrize("method, least", [(PriSM(channels="drawn"), 0.8), (FedHM(), 0.8), (OrigDrop(), 0.8)])
def test_a_full_network_is_trained_by_clients_that_can_hold_less_than_half_of_it(
    method: Method[Any], least: float, tmp_path: Path
) -> None:
    run = constrained(method, [0.4], tmp_path / "run")
    final = run.history[-1]["accuracy"]
    assert set(final) == {"0.4", "1.0"}
    assert final["1.0"] >= least, final
    network = run.customize(1.0)
    assert tensors_of(network)["network.conv2.weight"].shape == (16, 8, 3, 3)
    assert run.evaluate()["1.0"]["accuracy"] == pytest.approx(final["1.0"])


def test_an_unequal_fleet_trains_one_full_network(tmp_path: Path) -> None:
    devices = {"capacities": [0.4, 0.2], "fractions": [0.4, 0.6]}
    run = constrained(PriSM(channels="drawn"), [0.4], tmp_path / "run", devices=devices)
    assert set(run.history[-1]["accuracy"]) == {"0.2", "0.4", "1.0"}
    assert run.history[-1]["accuracy"]["1.0"] >= 0.7, run.history[-1]["accuracy"]


def test_a_profiled_run_has_the_refresh_as_a_stage_of_its_own(tmp_path: Path) -> None:
    run = az.Experiment(
        method=PriSM(refresh_every=2),
        data="digits",
        clients=4,
        model={"name": "small-cnn", "options": {"channels": [8, 16]}},
        devices={"capacities": [0.4]},
        training={"local_steps": 1},
        engine={"name": "inprocess"},
        rounds=2,
        evaluate_every=100,
    ).run(tmp_path / "run", profile=True)
    without, with_refresh = (event["profile"] for event in run.history)
    assert "svd" not in without
    assert with_refresh["svd"] > 0
    assert all(with_refresh[name] > 0 for name in ("extract", "train", "aggregate"))


# Counts


@pytest.mark.parametrize(
    "method, counts",
    [(PriSM(), [0.495, 1.98, 4.46, 7.92]), (FedHM(), [2.48, 4.95, 7.43, 9.90])],
    ids=["prism", "fedhm"],
)
def test_block_convolutions_of_resnet18_have_the_papers_counts(method: Method[Any], counts: list[float]) -> None:
    x = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    made = Experiment(
        data=Data(train=(x, torch.arange(8) % 10), classes=10),
        clients=4,
        model="resnet18",
        method=method,
        devices={"capacities": KEEPS},
    )
    context = made.context
    assert len(inner_weights(context)) == 16
    state = method.init(context)
    for keep, millions in zip(KEEPS, counts):
        message = method.extract(context, state, Client(0, 0, Size(keep), 1, 1, 0))
        blocks = sum(t.numel() for n, t in message.tensors.items() if n.startswith(("left.", "right.")))
        assert blocks / 1e6 == pytest.approx(millions, rel=0.02)


def held_bytes(method: Method[Any], capacity: float, model: Any) -> int:
    """What a training step of a client holds for its backward pass."""
    x = torch.zeros(32, 3, 32, 32, dtype=torch.uint8)
    made = Experiment(
        data=Data(train=(x, torch.arange(32) % 10), classes=10),
        clients=2,
        model=model,
        method=method,
        devices={"capacities": [capacity]},
        training={"batch_size": 32, "weight_decay": 2e-4},
        tricks={"batch_norm": "batch"},
    )
    return made.cost(made.context.largest).activation_bytes


def test_the_frobenius_term_adds_only_two_products_of_kernels_to_what_a_step_holds() -> None:
    model = {"name": "small-cnn", "options": {"channels": [8, 16]}}
    with_term, without = (held_bytes(PriSM(frobenius=factor), 0.8, model) for factor in (1.0, 0.0))
    kernels = rank((16, 8, 3, 3), 0.8)  # of the one inner weight; a product of a factor with itself has a row for each
    assert abs(with_term - without - 2 * 4 * kernels**2) <= 64


@pytest.mark.slow
def test_activations_of_resnet18_at_0_8_are_the_papers_share_of_the_full_networks() -> None:
    assert held_bytes(PriSM(), 0.8, "resnet18") / held_bytes(FedAvg(), 1.0, "resnet18") == pytest.approx(1.15, abs=0.01)


# Windows of channels


def normed(width: int = 8) -> nn.Module:
    """6 inputs, two hidden layers with batch-norm, 3 classes."""
    hidden = [nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU()]
    hidden += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, 3))


def weak_run(
    method: Method[Any],
    path: Path,
    capacities: Sequence[float] = (0.25,),
    rounds: int = 3,
    width: int = 8,
    **evaluation: Any,
) -> Run:
    """A short run of a fleet in which nobody can hold the full network."""
    x, y = numbers(0, 60, 6), torch.arange(60) % 3
    return Experiment(
        data=Data(train=(x + y[:, None], y), test=(x[:30] + y[:30, None], y[:30])),
        clients=4,
        model=normed(width),
        evaluation=evaluation,
        method=method,
        devices={"capacities": list(capacities)},
        training={"local_epochs": 2, "batch_size": 8, "learning_rate": 0.1},
        engine={"name": "inprocess"},
        rounds=rounds,
        evaluate_every=rounds,
    ).run(path / "run")


def test_clients_compute_windows_that_have_no_channel_in_common_and_each_gets_all_in_turn() -> None:
    method = WINDOWS
    context = context_of(method, [0.25])
    units = [[kept.units(group.name) for group in context.axes.groups] for kept in windows(context, 0.25)]
    assert units == [[(i, i + 1)] * 2 for i in (0, 2, 4, 6)]
    state = method.init(context)
    for client, round in ((0, 1), (1, 1), (0, 2), (3, 2)):
        message = method.extract(context, state, Client(client, 0, Size(0.25), round, 5, 0))
        first = 2 * ((client + round) % 4)
        assert torch.equal(message.tensors["network.0.weight"], context.start()["0.weight"][first : first + 2])
        assert torch.equal(message.tensors["network.4.weight"], context.start()["4.weight"][:, first : first + 2])
        product = message.tensors["left.2:weight"] @ message.tensors["right.2:weight"]
        block = context.start()["2.weight"][first : first + 2, first : first + 2]
        np.testing.assert_allclose(product, block, atol=1e-5)


def test_the_full_network_has_every_window_and_zeros_between_them_also_after_rounds(tmp_path: Path) -> None:
    run = weak_run(WINDOWS, tmp_path)
    weight = tensors_of(run.customize("1.0"))["3.weight"].numpy()
    inside = np.kron(np.eye(4), np.ones((2, 2))) > 0
    assert np.abs(weight[~inside]).max() < 1e-6
    assert np.abs(weight[inside]).min() > 1e-4
    started = run.experiment.context.start()
    full = tensors_of(run.customize("1.0"))
    assert bool((full["0.weight"] != started["0.weight"]).all())
    assert bool((full["6.weight"] != started["6.weight"]).all())


def test_all_windows_that_have_a_channel_lie_inside_one_of_them() -> None:
    wide = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def of(capacities: list[float]) -> list[list[set[int]]]:
        context = context_of(WINDOWS, capacities, wide)
        return [[set(kept.units("0")) for kept in windows(context, width)] for width in capacities]

    def run(first: int, count: int) -> set[int]:
        return set(range(first, first + count))

    assert of([0.2]) == [[run(0, 4), run(4, 4), run(8, 4), run(12, 4)]]
    small, large = of([0.2, 0.4])
    assert large == [run(0, 7), run(7, 7)]
    assert small == [run(0, 4), run(3, 4), run(7, 4), run(10, 4)]
    small, large = of([0.2, 0.6])
    assert large == [run(0, 10)]
    assert small == [run(0, 4), run(4, 4), run(6, 4), run(10, 4)]
    for family in (of([0.2, 0.4]), of([0.2, 0.6]), of([0.1, 0.3, 0.4]), of([0.2, 0.5, 1.0])):
        every = [window for own in family for window in own]
        for channel in set().union(*every):
            inputs = set().union(*(window for window in every if channel in window))
            assert inputs in every


def test_the_plan_says_how_much_of_the_network_can_ever_be_trained() -> None:
    # 0.weight 48, 0.bias 8, 2.weight 64, 2.bias 8, 4.weight 24, 4.bias 3: 155
    def share(method: Method[Any]) -> list[str]:
        return [notice for notice in method.notices(context_of(method, [0.25])) if "can ever train" in notice]

    assert "107 of the full network's 155 parameters (69%)" in share(WINDOWS)[0]  # of 2.weight 4 blocks of 2 x 2
    assert "the rest is zero" in share(WINDOWS)[0]
    few = [notice for notice in WINDOWS.notices(context_of(WINDOWS, [0.25])) if "each of 4 windows" in notice]
    assert len(few) == 1
    assert "29 of the full network's 155 parameters (19%)" in share(PriSM())[0]
    assert "keeps its start" in share(PriSM(dropped="kept"))[0]
    assert share(PriSM(channels="all")) == share(PriSM(channels="drawn")) == []


def test_statistics_of_a_network_that_nobody_can_run_are_near_those_that_it_would_have_itself(tmp_path: Path) -> None:
    run = weak_run(WINDOWS, tmp_path)
    shares = [run.experiment.shares.share(client).train for client in range(4)]
    inputs = [part.batch(torch.arange(len(part)))[0] for part in shares]
    oracle = untrained(run.experiment.context, WINDOWS, run.state, Size(1.0), [torch.cat(inputs)])
    for norm, mean, variance in zip(batch_norms(run.customize("1.0")), oracle.means, oracle.variances):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        # The first pass of a client normalises by its own batch, so the second is near the truth and not at it.
        torch.testing.assert_close(norm.running_mean, mean, atol=0.1, rtol=0.05)
        torch.testing.assert_close(norm.running_var, variance, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("method", "capacities", "channels", "reached"),
    [
        (WINDOWS, [0.25], 8, 8),
        (WINDOWS, [0.2], 16, 16),  # 4 windows of 4 channels
        (WINDOWS, [0.4], 16, 14),  # 2 windows of 7 channels
        (WINDOWS, [0.2, 0.4], 16, 14),  # in each of these, 2 of 4 channels, which share one
        (WINDOWS, [0.2, 0.6], 16, 14),  # a window of 10, and one of 4 beside it
        (WINDOWS, [0.1, 0.3, 0.4], 20, 20),
        (PriSM(), [0.25], 8, 2),
        (PriSM(), [0.2, 0.4], 16, 7),
    ],
    ids=lambda value: getattr(value, "channels", str(value)),
)
def test_statistics_of_the_pieces_make_exactly_those_of_the_whole_network(
    method: PriSM, capacities: list[float], channels: int, reached: int, tmp_path: Path
) -> None:
    run = weak_run(method, tmp_path, capacities, width=channels)
    context, x, full = run.experiment.context, numbers(7, 50, 6), Size(1.0)
    todo = jobs(context, method, run.state, [full], run.experiment.size_of_group.values())
    found = {}
    for job in todo:
        message = job.extract(Client(0, 0, job.size, 1, 0, 0, "calibrate"))
        found[job.label] = collect(without_statistics(method.build(context, message)), [x])
    joined, oracle = whole(context, todo, found)["1.0"], untrained(context, method, run.state, full, [x])
    for mean, variance, true, spread in zip(joined.means, joined.variances, oracle.means, oracle.variances):
        varies = spread > 1e-9  # what nobody has is constant
        assert int(varies.sum()) == reached
        torch.testing.assert_close(mean[varies], true[varies], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(variance[varies], spread[varies], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "method", [WINDOWS, PriSM(), PriSM(channels="drawn"), PriSM(channels="all"), FedHM(), OrigDrop()], ids=str
)
def test_a_server_with_samples_estimates_what_nobody_can_run_by_a_plain_pass_over_them(
    method: Method[Any], tmp_path: Path
) -> None:
    run = weak_run(method, tmp_path, calibration_proxy=40)
    random = generator(0, "proxy")
    samples = torch.randperm(60, generator=random)[:40]
    full = {name: tensor.double().numpy() for name, tensor in tensors_of(run.customize("1.0")).items()}
    assert run.experiment.data is not None
    x = run.experiment.data.train.batch(samples)[0].double().numpy()
    for layer, norm in (("0", "1"), ("3", "4")):
        x = x @ full[f"{layer}.weight"].T + full[f"{layer}.bias"]
        mean, variance = x.mean(0), x.var(0)
        np.testing.assert_allclose(full[f"{norm}.running_mean"], mean, atol=1e-5)
        np.testing.assert_allclose(full[f"{norm}.running_var"], variance, rtol=1e-4, atol=1e-6)
        x = (x - mean) / np.sqrt(variance + 1e-5) * full[f"{norm}.weight"] + full[f"{norm}.bias"]
        x = np.maximum(x, 0)
    planned = {own["size"]: own for own in plan(run.experiment)["statistics"]}
    assert planned["1.0"] == {"size": "1.0", "by": "server", "pieces": 1, "bytes_down": 0, "bytes_up": 0}
    assert planned["0.25"]["by"] == "clients"
    assert "by the server on its own samples" in statistics_lines(list(planned.values()))[-1]
    asked = run.history[-1]["calibration"]
    assert 4 * planned["0.25"]["bytes_down"] == pytest.approx(asked["bytes_down"], rel=0.1)  # nothing for the full one


def test_the_servers_samples_serve_sizes_that_were_never_trained_too(tmp_path: Path) -> None:
    run = weak_run(WINDOWS, tmp_path, calibration_proxy=40)
    network, (x, _) = run.customize(0.5), run.experiment.calibration_proxy().batch(torch.arange(40))  # type: ignore[union-attr]
    with torch.no_grad():
        first = network.get_submodule("0")(x)
    np.testing.assert_allclose(batch_norms(network)[0].running_mean, first.mean(0), atol=1e-5)


def test_a_server_without_samples_cannot_calibrate_and_says_so_at_once() -> None:
    tables = {"data": {"name": "devices"}, "model": {"name": "mlp"}, "method": {"name": "prism"}}
    with pytest.raises(ConfigError, match=r"calibration_proxy: .*data\.test"):
        from_dict(tables, ["evaluation.calibration_proxy=10"])

    tables["data"]["test"] = "digits"
    part = Experiment.from_config(from_dict(tables, ["evaluation.calibration_proxy=10"])).calibration_proxy()
    assert part is not None
    assert len(part) == 10

    def share(device: int) -> Share:
        parts = Data(train=(numbers(device, 12, 6), torch.arange(12) % 3)).train
        return Share(parts, parts)

    own = {"on": ["clients"], "calibration_proxy": 10}
    made = Experiment(data=share, clients=4, model=normed(), method=WINDOWS, evaluation=own)
    assert any("calibration_proxy: given 10" in notice for notice in plan(made)["notices"])


def test_the_plan_counts_the_parts_of_statistics_in_words() -> None:
    estimate = {"size": "1.0", "by": "pieces", "bytes_down": 10, "bytes_up": 2}
    one, many = statistics_lines([estimate | {"pieces": 1}])[1], statistics_lines([estimate | {"pieces": 4}])[1]
    assert "put together from one part that clients can run" in one
    assert "put together from 4 parts that clients can run" in many


@pytest.mark.parametrize("method", [WINDOWS, PriSM(channels="drawn"), FedHM()], ids=["windows", "drawn", "fedhm"])
def test_no_client_is_sent_more_than_it_can_train_and_what_travels_is_counted(
    method: Method[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []

    plain = InProcess.perform

    def spy(engine: InProcess, messages: Iterable[SubModel]) -> Iterator[Update]:
        for message in messages:
            for answer in plain(engine, [message]):
                sent = size_bytes(message.tensors, message.ticket.to_json())
                seen.append((message.ticket.job, sent, size_bytes(answer.tensors, answer.to_json())))
                yield answer

    monkeypatch.setattr(InProcess, "perform", spy)
    run = weak_run(method, tmp_path)
    most = max(sent for task, sent, _ in seen if task == "train")
    asked = [(sent, returned) for task, sent, returned in seen if task == "calibrate"]
    assert max(sent for sent, _ in asked) < most + 1000  # a second pass has the statistics of the first
    counted = run.history[-1]["calibration"]
    assert counted == {"bytes_down": sum(s for s, _ in asked), "bytes_up": sum(r for _, r in asked)}
    planned = plan(run.experiment)["statistics"]
    assert [own["size"] for own in planned] == ["0.25", "1.0"]
    assert planned[1]["by"] == ("pieces" if method == WINDOWS else "batch")
    assert 4 * sum(own["bytes_down"] for own in planned) == pytest.approx(counted["bytes_down"], rel=0.1)
    assert 4 * sum(own["bytes_up"] for own in planned) == pytest.approx(counted["bytes_up"], rel=0.1)


def test_a_network_without_statistics_ships_as_it_was_measured_by_its_batch(tmp_path: Path) -> None:
    run = weak_run(PriSM(channels="drawn"), tmp_path)
    assert all(norm.running_mean is None for norm in batch_norms(run.customize("1.0")))
    assert all(norm.running_mean is not None for norm in batch_norms(run.customize("0.25")))
    x, y = evaluation_part(run.experiment).batch(torch.arange(30))
    with torch.no_grad():
        right = (run.customize("1.0")(x).argmax(1) == y).float().mean()
    assert float(right) == pytest.approx(run.history[-1]["accuracy"]["1.0"])


def test_statistics_of_parts_are_put_together_by_channel_and_the_first_rank_that_has_it_counts() -> None:
    def part(mean: list[float], variance: list[float], count: float) -> Statistics:
        return Statistics((torch.tensor(mean),), (torch.tensor(variance),), (count,))

    ranks = [
        [(part([1.0, 3.0], [1.0, 1.0], 1.0), [torch.tensor([0, 1])]), (part([5.0], [2.0], 3.0), [torch.tensor([1])])],
        [(part([9.0, 7.0], [4.0, 5.0], 8.0), [torch.tensor([1, 2])])],
    ]
    whole = put_together(ranks, [4])
    assert whole.means[0].tolist() == pytest.approx([1.0, 4.5, 7.0, 0.0])  # (3 + 3 x 5) / 4
    assert whole.variances[0].tolist() == pytest.approx([1.0, 2.5, 5.0, 1.0])  # (1 + 3 x 2) / 4 + 3/4 (2)^2 / 4


def test_options_that_would_change_nothing_are_refused_before_a_run_and_borne_in_an_older_one(tmp_path: Path) -> None:
    useless = [
        PriSM(channels="drawn", dropped="kept"),
        PriSM(channels="all", dropped="kept"),
        PriSM(sampling="top", kappa=4.0),
    ]
    for method, words in zip(useless, ['channels = "drawn"', 'channels = "all"', 'sampling = "top"']):
        made = Experiment(data="digits", clients=4, model="small-cnn", method=method, devices={"capacities": [0.5]})
        with pytest.raises(ConfigError, match=words):
            plan(made)
        with pytest.raises(ConfigError, match=words):
            made.run(tmp_path / "new")
    run = weak_run(PriSM(sampling="top"), tmp_path, rounds=1)
    config = run.directory / "config.toml"
    config.write_text(config.read_text().replace("kappa = 2.5", "kappa = 4.0"))
    assert az.load(run.directory, model=normed(), data=run.experiment.data).round == 1


# Transformers


@pytest.mark.slow  # learns a transformer first
def test_a_transformers_sub_models_start_near_the_learned_network_with_attention_whole() -> None:
    source = Experiment(data="digits", clients=1, model="vit-tiny", method=PriSM()).data
    assert isinstance(source, Data)
    x, y = source.train.batch(torch.arange(len(source.train)))
    x = to_input(x)
    torch.manual_seed(0)
    vit = vit_tiny((1, 8, 8), 10, patch=2, width=24, depth=2, heads=2, expansion=4)
    optimizer = torch.optim.Adam(vit.parameters(), 3e-3)
    for batch in (part for _ in range(8) for part in torch.randperm(len(x)).split(64)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(vit(x[batch]), y[batch]).backward()
        optimizer.step()
    learned = float((vit(x).argmax(1) == y).float().mean())
    assert learned > 0.8

    def start(method: Method[Any], keep: float) -> float:
        made = Experiment(data="digits", clients=4, model=vit, method=method, devices={"capacities": [keep]})
        message = method.extract(made.context, method.init(made.context), Client(0, 0, Size(keep), 1, 5, 0))
        with torch.no_grad():
            return float((method.build(made.context, message).eval()(x).argmax(1) == y).float().mean())

    assert start(PriSM(channels="mlp"), 0.2) > 0.5
    assert start(PriSM(channels="mlp"), 0.4) > 0.5
    assert start(PriSM(), 0.4) < 0.4


def test_only_feed_forward_layers_are_decomposed_and_nothing_is_narrowed() -> None:
    method = PriSM(channels="mlp")
    vit = vit_tiny((1, 8, 8), 10, patch=2, width=24, depth=2, heads=2, expansion=4)
    made = Experiment(data="digits", clients=4, model=vit, method=method, devices={"capacities": [0.25]})
    message = method.extract(made.context, method.init(made.context), Client(0, 0, Size(0.25), 1, 5, 0))
    factors = {name: tuple(tensor.shape) for name, tensor in message.tensors.items() if ":" in name}
    assert factors == {
        f"{side}.blocks:{block}:{layer}:weight": shape
        for block in (0, 1)
        for side, layer, shape in (
            ("left", "expand", (96, 6)),
            ("right", "expand", (6, 24)),
            ("left", "contract", (24, 6)),
            ("right", "contract", (6, 96)),
        )
    }
    with pytest.raises(MethodError, match='channels = "mlp": the network has no feed-forward layers'):
        method.init(context_of(method, [0.5], nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))))
