"""Split-Mix: which bases a client trains, what becomes of them, one pass or one after another, and what is mixed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anysize as az
from anysize import models
from anysize.client.process import one_thread
from anysize.client.shards import finished as finished_network
from anysize.client.work import perform
from anysize.data import TensorPart
from anysize.elastic.axes import trace
from anysize.elastic.ensemble import Ensemble, mixed, split
from anysize.elastic.grouping import Grouped, grouped, pays, stacked
from anysize.elastic.skeleton import fill, hollow, tensors_of
from anysize.elastic.slicing import narrow
from anysize.engines.inprocess import InProcess
from anysize.errors import ConfigError, DataError, MethodError
from anysize.exports.formats import export
from anysize.methods import Client, FedAvg, SplitMix
from anysize.methods.size import Size
from anysize.methods.splitmix import SplitMixState, sampled_bases
from anysize.models.normalize import normalized
from anysize.runtime import load
from anysize.server.calibration import calibrated
from anysize.server.judging import on_test
from anysize.testing import Trial, make_trial
from anysize.wire import Tensors, flatten
from test_golden import answers, context_of, network, numbers
from test_laws import MODELS, Residual, convolutional, perceptron

# Algorithm 2


def test_every_base_is_first_once_in_every_pass_through_the_order() -> None:
    for shuffle in range(6):
        places = range(shuffle * 8, shuffle * 8 + 8)
        first = [sampled_bases(1, 8, place, 3, torch.Generator())[0] for place in places]
        assert sorted(first) == list(range(8))


def test_the_order_is_shuffled_anew_in_every_pass() -> None:
    orders = [[sampled_bases(1, 8, 8 * s + i, 3, torch.Generator())[0] for i in range(8)] for s in range(6)]
    assert len({tuple(order) for order in orders}) == 6


def test_bases_are_drawn_without_replacement_and_all_alike() -> None:
    counts = np.zeros(4)
    for place in range(2000):
        drawn = sampled_bases(3, 4, place, 0, torch.Generator().manual_seed(place))
        assert len(set(drawn)) == 3
        counts[drawn] += 1
    np.testing.assert_allclose(counts / 2000, 0.75, atol=0.03)


def test_the_next_round_goes_on_where_the_last_one_stopped() -> None:
    context = context_of(SplitMix(), [0.25, 1.0])
    state = SplitMix().init(context)
    seen = []
    for round in range(1, 5):
        clients = [Client(i, i, Size(0.25), round, 1, 0) for i in range(2)]
        messages = [SplitMix().extract(context, state, client) for client in clients]
        seen += [message.ticket.more["bases"] for message in messages]
        updates = [az.methods.Update(m.tensors, m.ticket, samples=1) for m in messages]
        state = SplitMix().aggregate(context, state, iter(updates))
    assert state.served == 8
    assert sorted(seen[:4]) == sorted(seen[4:]) == [[0], [1], [2], [3]]


# Algorithm 1


def test_each_base_is_the_mean_over_its_clients_and_others_keep_their_value() -> None:
    context = context_of(SplitMix(), [0.125, 0.25, 1.0], tricks={"batch_norm": "tracked"})
    state = SplitMix().init(context)
    about = [{"width": 0.25, "samples": 3}, {"width": 0.25, "samples": 5}, {"width": 0.125, "samples": 2}]
    updates = answers(context, SplitMix(), state, about)
    after = SplitMix().aggregate(context, state, iter(updates))
    untouched = 0
    for base, tensors in state.bases.items():
        holders = [u for u in updates if int(base) in u.ticket.more["bases"]]
        untouched += not holders
        for name, old in tensors.items():
            total = sum(u.samples for u in holders)
            parts = [u.samples * u.tensors[f"{base}.{name}"].numpy() for u in holders]
            expected = sum(parts) / total if holders else old.numpy()
            np.testing.assert_allclose(after.bases[base][name], expected, rtol=1e-5, atol=1e-6)
    assert untouched > 0


def test_a_mixed_network_gives_the_mean_of_the_first_bases_outputs() -> None:
    context = context_of(SplitMix(), [0.25, 0.8, 1.0])
    state = replace(SplitMix().init(context), order=[2, 0, 3, 1])
    x = numbers(7, 5, 6)
    with torch.no_grad():
        for width, places in ((0.25, [2]), (0.5, [2, 0]), (0.8, [2, 0, 3]), (1.0, [2, 0, 3, 1])):
            outputs = [fill(context.skeleton(0.25), state.bases[str(i)])(x).numpy() for i in places]
            given = SplitMix().customize(context, state, Size(width))(x)
            np.testing.assert_allclose(given, np.mean(outputs, axis=0), rtol=1e-5, atol=1e-6)


def test_a_width_below_the_base_or_above_all_is_refused() -> None:
    context = context_of(SplitMix(), [0.5, 1.0])
    state = SplitMix().init(context)
    with pytest.raises(MethodError, match=r"there are 2 bases of width 0\.5"):
        SplitMix().customize(context, state, Size(0.25))
    with pytest.raises(MethodError, match=r"fits no base of width 0\.5"):
        SplitMix(base_width=0.5).init(context_of(SplitMix(base_width=0.5), [0.25, 1.0]))
    with pytest.raises(MethodError, match="base_width = 2"):
        SplitMix(base_width=2.0)


def test_a_network_that_cannot_be_split_into_equal_bases_is_refused() -> None:
    """The norm's four groups cut across three layers of eight channels."""

    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 8) for _ in range(3))
            self.norm, self.head = nn.GroupNorm(4, 24), nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(torch.cat([self.a(x), self.b(x), self.c(x)], 1)))

    x, y = np.zeros((8, 2), np.float32), np.arange(8) % 3
    made = az.Experiment(
        data=az.Data(train=(x, y)), clients=2, model=Uneven(), method="splitmix", devices={"capacities": [0.5, 1.0]}
    )
    with pytest.raises(MethodError, match=r"cannot be split into bases of one shape: 'a\.weight' would have"):
        made.method.init(made.context)


@pytest.mark.parametrize("bases", [None, [9], [0, 1], ["0"]])
def test_an_update_that_lies_about_its_bases_is_refused(bases: Any) -> None:
    context = context_of(SplitMix(), [0.25, 1.0])
    state = SplitMix().init(context)
    (update,) = answers(context, SplitMix(), state, [{"width": 0.25, "samples": 1}])
    own = update.ticket.more["bases"][0]
    tensors = {name.replace(f"{own}.", "9.", 1): t for name, t in update.tensors.items()} if bases == [9] else None
    wrong = replace(update, ticket=replace(update.ticket, more={"bases": bases}), tensors=tensors or update.tensors)
    with pytest.raises(MethodError, match="splitmix: an update"):
        SplitMix().aggregate(context, state, iter([wrong]))


def test_one_base_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    states = []
    for method in (SplitMix(), FedAvg()):
        run = az.Experiment(
            data="digits",
            clients=8,
            partition={"split": "classes", "classes_per_client": 4, "fraction": 0.3},
            model={"name": "small-cnn", "options": {"channels": [8, 16]}},
            method=method,
            devices={"capacities": [1.0], "clients_per_round": 3},
            training={"learning_rate": 0.05},
            tricks={"masked_loss": True, "batch_norm": "tracked", "classwise_head": True},
            rounds=2,
            evaluate_every=2,
        ).run(out=tmp_path / type(method).__name__)
        states.append({n.rpartition("/")[2]: t for n, t in flatten(run.state)[0].items()})
    assert set(states[0]) == set(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# The start


def test_bases_start_as_different_blocks_of_the_full_network() -> None:
    context = context_of(SplitMix(), [0.25, 1.0])
    start, state = context.start(), SplitMix().init(context)
    for i in range(4):
        rows = slice(2 * i, 2 * i + 2)
        assert torch.equal(state.bases[str(i)]["0.weight"], start["0.weight"][rows])
        assert torch.equal(state.bases[str(i)]["2.weight"], start["2.weight"][rows, rows])
        assert torch.equal(state.bases[str(i)]["4.weight"], start["4.weight"][:, rows])


def test_blocks_start_again_where_units_run_out() -> None:
    axes = context_of(SplitMix(), [1.0], nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))).axes
    assert [kept.units("0") for kept in split(axes, 0.4, 3)] == [(0, 1), (2, 3), (0, 4)]


@pytest.mark.parametrize("kind", [SplitMix, FedAvg])
def test_rescaled_initialisation_has_the_bounds_of_the_full_width(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
    for rescaled, inputs in ((True, 256), (False, 64)):
        context = context_of(kind(), [0.25, 1.0], model, tricks={"rescaled_init": rescaled})
        tensors = next(iter(flatten_first(kind().init(context)).values()))
        # torch draws from +- 1 / sqrt(fan-in); of thousands of draws the largest is close to the bound.
        for name, fan in (("0.weight", 6), ("2.weight", inputs), ("4.weight", inputs)):
            assert float(tensors[name].abs().max()) == pytest.approx(1 / math.sqrt(fan), rel=0.03)
        assert float(tensors["2.bias"].abs().max()) == pytest.approx(1 / math.sqrt(inputs), rel=0.1)


def flatten_first(state: Any) -> dict[str, Tensors]:
    return state.bases if isinstance(state, SplitMixState) else state.networks


def test_a_learned_start_is_never_rescaled() -> None:
    context = context_of(SplitMix(), [0.25, 1.0], pretrained=True, tricks={"rescaled_init": False})
    state = SplitMix().init(context)
    assert torch.equal(state.bases["0"]["2.weight"], context.start()["2.weight"][:2, :2])


# One pass


GROUPED = ["conv with batch-norm", "conv without", "mlp", "mlp with batch-norm", "residual"]


def client_update(trial: Trial, position: int, width: float) -> Tensors:
    client = trial.client(position, Size(width))
    share = trial.experiment.shares.share(position)
    with one_thread():
        return perform(trial.context.for_client(), trial.method, trial.extract(client), share).tensors


def check_one_pass(name: str, tricks: dict[str, Any], tolerance: float, **options: Any) -> None:
    """A client's update is the same whether its bases go through in one pass, as they then do, or one by one."""
    updates = []
    for one_pass in (True, False):
        torch.manual_seed(0)
        trial = make_trial(SplitMix(one_pass=one_pass, **options), MODELS[name](), (0.25, 1.0), tricks)
        built = trial.method.build(trial.context, trial.extract(trial.client(0, Size(1.0))))
        assert isinstance(built, Grouped) == one_pass
        updates.append(client_update(trial, 0, 1.0))
    assert set(updates[0]) == set(updates[1])
    for key, tensor in updates[0].items():
        torch.testing.assert_close(tensor, updates[1][key], rtol=1e-3, atol=tolerance)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("tricks", [{}, {"batch_norm": "tracked"}, {"proximal": 0.1}], ids=str)
def test_one_pass_trains_what_one_after_another_does(name: str, tricks: dict[str, Any]) -> None:
    check_one_pass(name, tricks, 1e-5)


@pytest.mark.parametrize("dual", [False, True], ids=["single norms", "dual norms"])
@pytest.mark.parametrize("name", ["conv with batch-norm", "mlp with batch-norm", "residual"])
def test_one_pass_attacks_and_trains_every_base_as_one_after_another_does(name: str, dual: bool) -> None:
    check_one_pass(name, {"adversarial": 0.5, "attack_steps": 3, "batch_norm": "tracked"}, 1e-4, dual_norm=dual)


@pytest.mark.parametrize("name", ["recurrent", "tied", "joined"])
def test_networks_that_cannot_be_grouped_are_trained_one_after_another_and_say_so(name: str) -> None:
    trial = make_trial(SplitMix(), MODELS[name](), (0.25, 1.0), None)
    built = trial.method.build(trial.context, trial.extract(trial.client(0, Size(1.0))))
    assert not isinstance(built, Grouped)
    assert any("one after another" in note for note in trial.method.notices(trial.context))
    client_update(trial, 0, 1.0)


def test_tricks_that_look_at_each_base_keep_them_apart() -> None:
    for tricks, training in (({"batch_norm": "local"}, {}), ({"proximal_form": "mean"}, {}), ({}, {"clip": 1.0})):
        context = context_of(SplitMix(), [0.25, 1.0], tricks=tricks, training=training)
        state = SplitMix().init(context)
        message = SplitMix().extract(context, state, Client(0, 0, Size(1.0), 1, 1, 0))
        message = replace(message, ticket=replace(message.ticket, job="train"))
        assert not isinstance(SplitMix().build(context, message), Grouped)
        assert len(SplitMix().notices(context)) == 1


def figures() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "benchmarks" / "splitmix_grouping.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_one_pass_is_chosen_where_it_was_measured_to_be_faster() -> None:
    """Overall, and nowhere much slower than one after another; what it is not chosen for would gain little."""
    for kind in ("networks", "under_attack"):
        chosen = [row for row in figures()[kind] if row["rule"]]
        assert sum(row["apart_ms"] for row in chosen) > 1.1 * sum(row["one_pass_ms"] for row in chosen)
        assert min(row["ratio"] for row in chosen) > 0.9
        assert max(row["ratio"] for row in figures()[kind] if not row["rule"]) < 1.1


def test_the_rule_on_shapes_is_the_one_that_was_measured() -> None:
    for row in figures()["layers"]:
        inputs, outputs, kernel, side = row["shape"]
        weight = (row["count"] * outputs, inputs, kernel, kernel)
        assert pays(weight, (32, row["count"] * inputs, side, side), row["count"]) == row["rule"]
    rows = [(row, kind == "under_attack") for kind in ("networks", "under_attack") for row in figures()[kind]]
    for row, own in rows:
        if row["network"] == "preresnet18" and row["count"] > 2:  # a second a row
            continue
        base = base_of(row["network"], tuple(row["input"]), row["width"])
        made = grouped(base, row["count"], [torch.zeros(2, *row["input"])], own)
        assert isinstance(made, Grouped) == row["rule"], row


@cache
def base_of(name: str, shape: tuple[int, ...], width: float) -> nn.Module:
    full = models.build(name, shape, 10)
    return hollow(narrow(full, trace(full, torch.zeros(2, *shape)), width))


def test_a_forward_that_mixes_channels_is_never_grouped() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 6)
            self.second = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)).flip(1))

    assert isinstance(grouped(hollow(Shuffled()), 3, [torch.zeros(2, 4)]), str)
    dropped = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    assert isinstance(grouped(hollow(dropped), 3, [torch.zeros(2, 4)]), str)


@pytest.mark.parametrize("make", [convolutional, lambda: perceptron(24, 16, normalised=True), Residual])
def test_a_grouped_network_gives_every_networks_outputs(make: Any) -> None:
    networks = [make() for _ in range(3)]
    whole = grouped(hollow(networks[0]), 3, [torch.zeros(2, 1, 8, 8)])
    assert isinstance(whole, Grouped)
    x = torch.rand(5, 1, 8, 8)
    given = fill(whole, stacked([tensors_of(one) for one in networks])).train()(x)
    torch.testing.assert_close(given, torch.cat([one.train()(x) for one in networks]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [convolutional, lambda: perceptron(24, 16, normalised=True), Residual])
def test_a_grouped_network_may_have_inputs_for_every_network(make: Any) -> None:
    networks = [normalized(make(), [0.4], [0.3]) for _ in range(3)]
    whole = grouped(hollow(networks[0]), 3, [torch.zeros(2, 1, 8, 8)], own=True)
    assert isinstance(whole, Grouped)
    parts = torch.rand(3, 5, 1, 8, 8)
    given = fill(whole, stacked([tensors_of(one) for one in networks])).train()(parts.flatten(0, 1))
    apart = torch.cat([one.train()(x) for one, x in zip(networks, parts)])
    torch.testing.assert_close(given, apart, rtol=1e-4, atol=1e-5)


def test_colours_are_normalised_alike_in_every_network() -> None:
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    networks = [normalized(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), mean, std) for _ in range(4)]
    whole = grouped(hollow(networks[0]), 4, [torch.zeros(2, 3, 5, 5)], own=True)
    assert isinstance(whole, Grouped)
    parts = torch.rand(4, 6, 3, 5, 5)
    given = fill(whole, stacked([tensors_of(one) for one in networks]))(parts.flatten(0, 1))
    expected = []
    for one, x in zip(networks, parts.numpy()):
        plain = (x - np.array(mean, np.float32)[:, None, None]) / np.array(std, np.float32)[:, None, None]
        expected.append(one.network(torch.from_numpy(plain)))
    torch.testing.assert_close(given, torch.cat(expected), rtol=1e-4, atol=1e-5)


# The order of bases


def test_the_best_base_on_held_out_data_is_mixed_first(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", SplitMix(sort_bases=True))
    state, context = run.state, run.experiment.context
    assert sorted(state.order) == list(range(4))
    held = [run.experiment.shares.share(client).held_out for client in range(6)]
    right = []
    for i in range(4):
        base = fill(context.skeleton(0.25), state.bases[str(i)]).eval()
        batches = [part.batch(torch.arange(len(part))) for part in held]
        right.append(sum(int((base(x / 255.0).argmax(1) == y).sum()) for x, y in batches))
    assert [right[i] for i in state.order] == sorted(right, reverse=True)


def test_sorting_without_held_out_data_is_refused_before_the_first_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set data\.validation"):
        small_run(tmp_path / "run", SplitMix(sort_bases=True), validation=0.0)
    assert not (tmp_path / "run").exists()


def small_run(out: Path, method: SplitMix, validation: float = 0.3, **more: Any) -> az.Run:
    return az.Experiment(
        data="digits",
        clients=6,
        partition={"validation": validation, "fraction": 0.5},
        model=more.pop("model", {"name": "mlp", "options": {"hidden": [16]}}),
        method=method,
        devices={"capacities": [0.25, 0.5, 1.0]},
        training={"learning_rate": 0.1, "batch_size": 16},
        rounds=more.pop("rounds", 3),
        evaluate_every=3,
        **more,
    ).run(out=out)


# From end to end


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> az.Run:
    model = {"name": "small-cnn", "options": {"channels": [16, 32]}}
    return small_run(tmp_path_factory.mktemp("splitmix") / "run", SplitMix(), model=model, rounds=6)


def test_digits_are_learned_at_every_width(finished: az.Run) -> None:
    accuracy = finished.history[-1]["accuracy"]
    assert list(accuracy) == ["0.25", "0.5", "1.0"]
    assert accuracy["1.0"] > 0.6


def test_a_customised_ensemble_is_one_network_with_fixed_statistics(finished: az.Run) -> None:
    small = finished.customize(size=0.5)
    assert isinstance(small, Ensemble)
    assert len(small.bases) == 2
    x = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(small(x)[:1], small(x[:1]), rtol=1e-4, atol=1e-5)
    assert isinstance(finished.customize(size=0.75), Ensemble)  # never trained by anybody, and three bases


@pytest.mark.parametrize("ending", ["onnx", "pt2", "safetensors"])
def test_an_ensemble_is_exported(finished: az.Run, tmp_path: Path, ending: str) -> None:
    made = export(finished.customize(size=1.0), tmp_path / f"net.{ending}", finished.experiment.signature)
    assert made.difference < 1e-4


@pytest.mark.parametrize("batch_norm", ["tracked", "calibrated"])
def test_every_number_of_bases_is_a_size_that_needs_no_data_and_changes_nothing(
    batch_norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet of a quarter and a half has four bases: three and four of them are sizes that nobody trained."""
    az.Experiment(
        data="digits",
        clients=4,
        partition={"fraction": 0.1},
        model={"name": "small-cnn", "options": {"channels": [8, 8]}},
        method=SplitMix(),
        devices={"capacities": [0.25, 0.5]},
        tricks={"batch_norm": batch_norm},
        rounds=1,
        engine={"name": "inprocess"},
    ).run(tmp_path / "run")
    run = az.load(tmp_path / "run")
    held = run.directory / "state.safetensors"
    before = held.read_bytes()
    monkeypatch.setattr(InProcess, "perform", lambda *_: pytest.fail("a client was asked"))
    monkeypatch.setattr(type(run), "_untrained", lambda *_: pytest.fail("data was asked for"))
    assert [size.label for size in run.sizes] == ["0.25", "0.5"]
    assert [size.label for size in run.offered] == ["0.25", "0.5", "0.75", "1.0"]
    shipped = load(run.bundle(tmp_path / "net.anysize").path)
    assert shipped.sizes == ("0.25", "0.5", "0.75", "1.0")
    x = torch.rand(5, 1, 8, 8)
    with torch.no_grad():
        each = [base(x).numpy() for base in run.customize(1.0).bases]
        for count, label in enumerate(shipped.sizes, start=1):
            mean = np.mean(each[:count], axis=0)  # Algorithm 1, line 11
            np.testing.assert_allclose(run.customize(label)(x), mean, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(shipped.switch(label)(x), mean, rtol=1e-4, atol=1e-5)
    if batch_norm == "tracked":
        kept = [norm.running_mean for norm in run.customize(0.75).modules() if isinstance(norm, nn.BatchNorm2d)]
        own = [run.state.bases[str(i)][f"{n}.running_mean"] for i in range(3) for n in norm_names(run)]
        assert all(torch.equal(found, tracked) for found, tracked in zip(kept, own, strict=True))  # type: ignore[arg-type]
    one = run.cost(run.size(0.25)).inference_bytes
    assert run.cost(run.size(0.75)).inference_bytes == 3 * one
    assert run.fitting(az.Budget(inference_bytes=3 * one)).label == "0.75"
    assert run.fitting(az.Budget(inference_bytes=4 * one - 1)).label == "0.75"
    assert held.read_bytes() == before


def norm_names(run: az.Run) -> list[str]:
    return [n for n, layer in run.experiment.context.template.named_modules() if isinstance(layer, nn.BatchNorm2d)]


def test_sizes_are_all_multiples_of_the_base_beside_those_that_were_trained() -> None:
    method = SplitMix(base_width=0.1)
    context = context_of(method, [0.1, 0.25, 1.0], nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)))
    labels = [size.label for size in method.mixtures(context)]
    assert labels == ["0.1", "0.25", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1.0"]


def test_costs_grow_by_whole_bases(finished: az.Run) -> None:
    costs = [finished.cost(Size(width)) for width in (0.25, 0.5, 1.0)]
    base = costs[0]
    for cost, count in zip(costs, (1, 2, 4)):
        assert cost.parameters == count * base.parameters
        assert cost.macs == count * base.macs
        assert cost.training_macs == pytest.approx(count * base.training_macs, abs=count)


def test_every_base_is_calibrated_by_clients_of_every_budget_and_reused_in_every_size() -> None:
    trial = make_trial(SplitMix(), None, [0.25, 1.0], {"batch_norm": "calibrated"})
    context, state, made = trial.context, trial.state, trial.experiment
    engine = InProcess(context, trial.method, made.shares, {})
    found = calibrated(context, trial.method, state, engine, made.fleet, made.size_of_group, 1, count=8)
    assert list(found) == [f"base {i}" for i in reversed(range(4))]
    x = torch.cat([made.shares.share(client).train.batch(torch.arange(12))[0] for client in range(8)]).float() / 255
    for base in range(4):  # what enters the first batch-norm, over the samples of all clients
        weights = state.bases[str(base)]
        entering = nn.functional.conv2d(x, weights["0.weight"], weights["0.bias"], padding=1).numpy()
        own = found[f"base {base}"]
        np.testing.assert_allclose(own.means[0], entering.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(own.variances[0], entering.var((0, 2, 3)), rtol=1e-4, atol=1e-6)
    for count in (1, 2, 3, 4):  # three bases are a size that nobody trained
        network = finished_network(context, trial.method, state, Size(count / 4), found)
        norms = [layer.running_mean for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
        assert len(norms) == count
        for base, mean in enumerate(norms):
            assert mean is not None
            assert torch.equal(mean, found[f"base {base}"].means[0])


def test_mixing_one_network_gives_that_network() -> None:
    net = network()
    assert mixed([net]) is net


# Domains


def test_domains_are_tested_apart_and_together() -> None:
    data = az.Data(
        train=(torch.rand(8, 4), torch.arange(8) % 2),
        test=TensorPart(torch.rand(40, 4), torch.arange(40) % 2, ["a"] * 10 + ["b"] * 30),
    )
    made = az.Experiment(data=data, clients=4, model=perceptron_for_rows(), method=SplitMix())
    context, state = made.context, SplitMix().init(made.context)
    assert data.test is not None
    apart = on_test(context, SplitMix(), state, data.test, {}, 500, by_domain=True)["1.0"]
    whole = on_test(context, SplitMix(), state, data.test, {}, 500)["1.0"]
    assert apart["accuracy"] == pytest.approx((10 * apart["accuracy/a"] + 30 * apart["accuracy/b"]) / 40)
    assert apart["accuracy"] == pytest.approx(whole["accuracy"])
    with pytest.raises(DataError, match="has no data groups"):
        on_test(context, SplitMix(), state, data.train, {}, 500, by_domain=True)


def test_the_figure_by_test_batch_normalises_each_domain_by_itself(tmp_path: Path) -> None:
    x, y = torch.rand(40, 4), torch.arange(40) % 2
    far = torch.cat([x[:10], 5 * x[10:] + 3])  # the second domain lies elsewhere
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    run = az.Experiment(
        data=az.Data(train=(x, y), test=TensorPart(far, y, ["a"] * 10 + ["b"] * 30)),
        clients=4,
        model=model,
        method=SplitMix(),
        training={"local_steps": 5},
        tricks={"batch_norm": "batch"},
        evaluation={"by_domain": True},
        rounds=1,
    ).run(tmp_path / "run")
    where = (run.experiment.context, SplitMix(), run.state, run.experiment.data.test, {}, 500)
    apart, mixed = (on_test(*where, by_domain=own)["1.0"]["accuracy"] for own in (True, False))
    assert run.history[-1]["by_test_batch"]["1.0"] == apart
    assert apart != mixed


def perceptron_for_rows() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_biases_of_the_classifier_start_apart_but_from_the_same_law() -> None:
    context = context_of(SplitMix(), [0.25, 1.0])
    state = SplitMix().init(context)
    (name,) = [name for name in context.axes.head if context.start()[name].dim() == 1]
    first = [own[name].tolist() for own in state.bases.values()]
    assert len({tuple(biases) for biases in first}) > 1
    assert all(sorted(biases) == sorted(context.start()[name].tolist()) for biases in first)
    assert first[0] == context.start()[name].tolist()
