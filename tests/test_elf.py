"""eLF: its mean against numpy, masks on the wire and in training, the look-up table, budgets, and a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import anysize as az
import small
from anysize import config as configs
from anysize.client.objectives import classifier_in, make_objective
from anysize.client.process import one_thread
from anysize.client.work import perform
from anysize.config.devices import DevicesConfig
from anysize.data import split
from anysize.devices.fleet import make_fleet
from anysize.elastic.skeleton import tensors_of
from anysize.errors import ConfigError, MethodError
from anysize.experiment.lookup import structure
from anysize.methods import ELF, FLANC, Client, FedAvg, FjORD, HeteroFL, PriSM, SHeteroFL, SplitMix, Update
from anysize.methods.elf import ELFState, key
from anysize.methods.size import Size
from anysize.methods.table import Entry, Table
from anysize.methods.training import Batch, Tricks
from anysize.runs.experiment import Experiment
from anysize.tasks import task
from anysize.testing import LAWS, check_method, make_trial
from anysize.wire import dump

DENSE: dict[str, Any] = {"proxy": 0.0, "sparsities": [0.0]}


def block(channels_in: int, channels_out: int, normalised: bool = True) -> nn.Sequential:
    norm = nn.BatchNorm2d(channels_out) if normalised else nn.Identity()
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), norm, nn.ReLU())


def network(normalised: bool = True, classes: int = 4) -> nn.Module:
    """Depth 3 for 8 x 8 images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stage = nn.Sequential(*(block(8, 8, normalised) for _ in range(3)))
        return nn.Sequential(block(1, 8, normalised), nn.MaxPool2d(4), stage, nn.Flatten(), nn.Linear(32, classes))


def test_averaged_over_holders_unchanged_updates_leave_the_state_unchanged() -> None:
    with one_thread():
        trial = make_trial(ELF(**DENSE, average="holders"), network(), (0.4, 1.0), None)
        assert LAWS["unchanged_updates"](trial) is None
        assert LAWS["full_round_trip"](trial) is None


def made(method: ELF | FedAvg, devices: dict[str, Any], classes: int = 4, **more: Any) -> Experiment:
    random = torch.Generator().manual_seed(0)
    x = torch.randint(256, (240, 1, 8, 8), generator=random, dtype=torch.uint8)
    y = torch.arange(240) % classes
    x[torch.arange(240), 0, :, y] = 255  # a column says which class it is
    return Experiment(
        data=az.Data(train=(x, y), test=(x, y)),
        clients=6,
        model=more.pop("model", None) or network(normalised=more.pop("normalised", False)),
        method=method,
        devices=devices,
        training=more.pop("training", {"batch_size": 16, "learning_rate": 0.05}),
        **more,
    )


def update(experiment: Experiment, state: ELFState, size: Size, client: int, samples: int, scale: float) -> Update:
    """A client that multiplied what it received."""
    message = experiment.method.extract(experiment.context, state, Client(client, client, size, 1, samples, 0))
    own = {name: t for name, t in message.tensors.items() if not name.startswith("mask/")}
    sent = {name: t * scale if t.is_floating_point() else t for name, t in own.items()}
    return Update(sent, message.ticket, samples=samples, loss=0.0)


@pytest.mark.parametrize("average", ["all", "holders"])
def test_the_mean_is_that_of_the_restored_networks(average: Any) -> None:
    """Oracle: Algorithm 1, line 13, in numpy, with three clients of depths 1 to 3 and weights 1, 2, 5."""
    experiment = made(ELF(**DENSE, average=average), {"capacities": [0.4, 0.7, 1.0]})
    context = experiment.context
    state = experiment.method.init(context)
    given = [(size, samples, scale) for size, samples, scale in zip(context.sizes, (1, 2, 5), (2.0, 3.0, -1.0))]
    updates = [update(experiment, state, size, i, n, scale) for i, (size, n, scale) in enumerate(given)]
    after = experiment.method.aggregate(context, state, iter(updates)).tensors
    for name, before in state.tensors.items():
        lost = {"2.1": 1, "2.2": 2}.get(name[:3], 0)  # a network of this depth or less lacks the block
        parts = [(n, scale if depth > lost else 0.0) for depth, (_, n, scale) in enumerate(given, start=1)]
        weight = sum(n for n, scale in parts if average == "all" or scale != 0.0)
        expected = before.numpy() * sum(n * scale for n, scale in parts) / weight
        np.testing.assert_allclose(after[name].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_block_that_nobody_held_keeps_its_values_and_statistics_come_from_holders_only() -> None:
    tracked = {"batch_norm": "tracked"}
    experiment = made(ELF(**DENSE), {"capacities": [0.4, 0.7]}, normalised=True, tricks=tracked)
    context = experiment.context
    state = experiment.method.init(context)
    shallow, deeper = context.sizes
    updates = [update(experiment, state, shallow, 0, 1, 1.0), update(experiment, state, deeper, 1, 1, 3.0)]
    after = experiment.method.aggregate(context, state, iter(updates)).tensors
    assert torch.equal(after["2.2.0.weight"], state.tensors["2.2.0.weight"])
    torch.testing.assert_close(after["2.1.1.running_var"], 3 * state.tensors["2.1.1.running_var"])
    torch.testing.assert_close(after["2.1.0.weight"], 1.5 * state.tensors["2.1.0.weight"])


def test_masked_entries_count_as_zeros_or_not_at_all() -> None:
    """Oracle: per entry in numpy, of one client with a mask and one without."""
    for average in ("all", "holders"):
        method = ELF(proxy=0.5, proxy_epochs=1, sparsities=(0.0, 0.5), average=average)  # type: ignore[arg-type]
        experiment = made(method, {"capacities": [1.0]})
        dense, masked = Size(1.0, "dense", 3), Size(1.0, "masked", 3, 0.5)
        context = experiment.context_for((masked, dense), experiment.table)
        state = method.init(context)
        made_of = replace_context(experiment, context)
        updates = [update(made_of, state, dense, 0, 1, 2.0), update(made_of, state, masked, 1, 3, 4.0)]
        after = method.aggregate(context, state, iter(updates)).tensors
        name = "2.1.0.weight"
        before = state.tensors[name].numpy()
        bits = np.unpackbits(state.masks[key(masked)][name].numpy(), count=before.size).reshape(before.shape)
        total = 4.0 if average == "all" else 1.0 + 3.0 * bits
        np.testing.assert_allclose(after[name].numpy(), before * (2.0 + 12.0 * bits) / total, rtol=1e-5)


def replace_context(experiment: Experiment, context: Any) -> Experiment:
    """The experiment with another context."""
    experiment.__dict__["context"] = context
    return experiment


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_masked_weights_stay_zero_in_training_and_do_not_travel(optimizer: str) -> None:
    method = ELF(proxy=0.5, proxy_epochs=1)
    experiment = made(method, {"capacities": [0.4, 1.0]}, tricks={"proximal": 0.1, "max_entropy": 1.0})
    training = experiment.config.training.model_copy(update={"optimizer": optimizer})
    context = replace(experiment.context, training=training)
    state, size = method.init(context), context.largest
    message = method.extract(context, state, Client(0, 0, size, 1, 10, 0))
    message = replace(message, ticket=replace(message.ticket, rate=0.05))
    module = method.build(context.for_client(), message)
    zeros = {name: tensor == 0 for name, tensor in tensors_of(module).items() if tensor.dim() > 1}
    assert sum(int(z.sum()) for z in zeros.values()) == pytest.approx(
        0.5 * sum(z.numel() for z in zeros.values()), abs=1
    )
    answer = perform(context.for_client(), method, message, experiment.shares.share(0))
    trained = method.aggregate(context, state, iter([answer])).tensors
    assert all(not trained[name][zero].any() for name, zero in zeros.items())
    assert any(not torch.equal(trained[name], state.tensors[name] * ~zero) for name, zero in zeros.items())
    whole = dump(tensors_of(module), {})
    cost = experiment.cost(size, state=state)
    assert cost.bytes_up < 0.62 * len(whole)  # half the values; biases, names and a ticket
    assert cost.bytes_down < 0.7 * len(whole)  # and a bit for each weight


def test_costs_are_those_of_the_messages_and_zeros_are_counted_apart() -> None:
    method = ELF(proxy=0.5, proxy_epochs=1, sparsities=(0.5,), scope="layer")
    experiment = made(method, {"capacities": [1.0]})
    context = experiment.context
    state, size = method.init(context), context.largest
    cost = experiment.cost(size, state=state)
    dense = experiment.cost(Size(1.0, "dense", 3), experiment.context_for((Size(1.0, "dense", 3),)))
    assert cost.macs == dense.macs == dense.nonzero_macs
    assert cost.activation_bytes == dense.activation_bytes
    assert cost.nonzero_macs == pytest.approx(0.5 * dense.macs, rel=0.01)
    weights = sum(t.numel() for t in state.tensors.values() if t.dim() > 1)
    assert cost.parameters == pytest.approx(dense.parameters - weights / 2, abs=8)
    sent = method.extract(context, state, Client(0, 0, size, 1, 16, 0))
    blob = dump(sent.tensors, replace(sent.ticket, rate=0.1).to_json())
    assert cost.bytes_down == len(blob)


def test_one_dense_size_is_fedavg_bit_for_bit() -> None:
    ends = []
    for method in (ELF(**DENSE, depths=(3,)), FedAvg()):
        experiment = made(method, {"capacities": [1.0]}, rounds=2, evaluate_every=2, engine={"name": "inprocess"})
        with one_thread():
            state = experiment.method.init(experiment.context)
            for number in (1, 2):
                state = one_round(experiment, state, number)
        ends.append(state.tensors if isinstance(state, ELFState) else state.networks["1.0"])
    assert set(ends[0]) == set(ends[1])
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def one_round(experiment: Experiment, state: Any, number: int) -> Any:
    context, method, updates = experiment.context, experiment.method, []
    for client in range(3):
        message = method.extract(context, state, Client(client, client, context.largest, number, 40, 0))
        message = replace(message, ticket=replace(message.ticket, rate=0.05))
        updates.append(perform(context.for_client(), method, message, experiment.shares.share(client)))
    return method.aggregate(context, state, iter(updates))


# --- the look-up table --------------------------------------------------------------------------------------------


def test_the_best_entry_that_fits_is_taken_by_accuracy_not_by_size() -> None:
    entries = tuple(
        Entry(Size(1.0, depth=depth, mask=0.5), accuracy, {}, {"macs": 100.0 * depth, "bytes": 10.0 * depth})
        for depth, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7))
    )
    table = Table(entries)
    assert [entry.size.depth for entry in table.best_first] == [2, 3, 1]
    assert table.entry(Size(1.0, "camera", 3, 0.5)) is entries[2]
    assert table.entry(Size(1.0, depth=3)) is None


def budgeted(tmp_path: Path, **budgets: Any) -> Experiment:
    groups = [{"name": name, "budget": budget} for name, budget in budgets.items()]
    method = ELF(proxy=0.5, proxy_epochs=1, sparsities=(0.0, 0.5), table=str(tmp_path / "table.safetensors"))
    return made(method, {"groups": groups})


def test_a_budget_in_any_unit_is_met_by_the_best_feasible_entry_of_the_file(tmp_path: Path) -> None:
    table = budgeted(tmp_path, any={"macs": 1e12}).table
    assert table is not None
    assert len(table.entries) == 6  # three depths, with and without a mask
    assert (tmp_path / "table.safetensors").is_file()
    for unit in ("macs", "parameters", "activation_bytes", "bytes", "latency_ms"):
        limit = sorted(entry.cost[unit] for entry in table.entries)[2]
        feasible = [entry for entry in table.entries if entry.cost[unit] <= limit]
        # Of what fits, since measured latencies come in any order; a group's name makes its messages longer.
        few = 1.01 * min(entry.cost["bytes"] for entry in feasible)
        found = budgeted(tmp_path, one={unit: limit}, both={unit: limit, "bytes": few})
        best = max(feasible, key=lambda entry: (entry.accuracy, -entry.cost["bytes"]))
        assert replace(found.size_of_group["one"], name="") == best.size
        assert found.size_of_group["one"].label == "one"
        tighter = [entry for entry in feasible if entry.cost["bytes"] <= few]
        assert replace(found.size_of_group["both"], name="") in [entry.size for entry in tighter]


def test_multiply_adds_without_zeros_are_a_unit_of_a_budget() -> None:
    """Oracle: of two masks at one depth only the sparser keeps less than the limit, and `macs` are the same."""
    method = ELF(proxy=0.5, proxy_epochs=1, prune_step=1.0, sparsities=(0.5, 0.9), depths=(3,), scope="layer")
    full = made(ELF(**DENSE), {"capacities": [1.0]})
    macs = full.cost(full.sizes[-1]).macs
    groups = [{"name": "skips", "budget": {"nonzero_macs": 0.3 * macs}}, {"name": "dense", "budget": {"macs": macs}}]
    experiment = made(method, {"groups": groups})
    size = experiment.size_of_group["skips"]
    assert (size.depth, size.mask) == (3, 0.9)
    assert experiment.cost(size).nonzero_macs <= 0.3 * macs < experiment.cost(size).macs == macs


def test_no_feasible_entry_is_an_error_that_names_the_smallest_cost(tmp_path: Path) -> None:
    table = budgeted(tmp_path, any={"macs": 1e12}).table
    assert table is not None
    least = min(entry.cost["bytes"] for entry in table.entries)
    with pytest.raises(ConfigError, match=rf"group 'tiny' can train no size; the smallest needs bytes = {least:g}"):
        _ = budgeted(tmp_path, tiny={"bytes": 10}).sizes


def test_a_table_of_another_experiment_and_a_latency_without_a_file_are_refused(tmp_path: Path) -> None:
    _ = budgeted(tmp_path, any={"macs": 1e12}).table
    other = made(ELF(proxy=0.4, proxy_epochs=1, table=str(tmp_path / "table.safetensors")), {"capacities": [1.0]})
    with pytest.raises(ConfigError, match="made for another experiment: method"):
        _ = other.table
    quick = made(ELF(proxy=0.5, proxy_epochs=1), {"groups": [{"name": "quick", "budget": {"latency_ms": 5}}]})
    with pytest.raises(ConfigError, match=r"name the file in method\.table"):
        _ = quick.sizes


def tabled(path: Path, **more: Any) -> Experiment:
    method = ELF(proxy=0.5, proxy_epochs=1, prune_step=1.0, depths=(1, 3), table=str(path / "table.safetensors"))
    return made(method, {"capacities": [1.0]}, **more)


def test_a_table_is_refused_for_another_network_of_equal_shapes(tmp_path: Path) -> None:
    _ = tabled(tmp_path).table
    other = network(normalised=False)
    other[0][2] = nn.Tanh()
    with pytest.raises(ConfigError, match="made for another experiment: model differ"):
        _ = tabled(tmp_path, model=other).table
    shifted = network(normalised=False)
    with torch.no_grad():
        shifted[4].weight += 0.01
    with pytest.raises(ConfigError, match="made for another experiment: start differ"):
        _ = tabled(tmp_path, model=shifted).table
    assert tabled(tmp_path, training={"batch_size": 16, "learning_rate": 0.05, "local_epochs": 7}).table is not None


def test_two_networks_of_equal_shapes_have_different_structures_if_they_compute_different_things() -> None:
    class Net(nn.Module):
        def __init__(self, slope: float) -> None:
            super().__init__()
            self.layer, self.slope = nn.Linear(3, 3), slope

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.leaky_relu(self.layer(x), self.slope)

    x = torch.zeros(2, 3)
    assert structure(Net(0.1), x) == structure(Net(0.1), x)
    assert structure(Net(0.1), x) != structure(Net(0.2), x)


def test_a_finished_table_is_taken_to_a_fleet_where_the_data_is_not(tmp_path: Path) -> None:
    method = {"name": "elf", "proxy": 0.2, "proxy_epochs": 1, "prune_step": 1.0, "table": "t.safetensors"}
    tables: dict[str, Any] = {
        "model": {"name": "elf-cnn", "options": {"blocks": 2}},
        "devices": {"groups": [{"name": "shallow", "depth": 1}, {"name": "deep", "depth": 2}]},
        "method": method,
    }
    here = {"data": {"name": "digits", "clients": 4, "normalize": False}}
    made_here = Experiment.from_config(configs.from_dict(tables | here, folder=tmp_path)).table
    assert made_here is not None
    there = tables | {"data": {"name": "devices"}, "task": {"classes": 10}}
    there["model"] = tables["model"] | {"input": [1, 8, 8]}
    fleet = Experiment.from_config(configs.from_dict(there, folder=tmp_path))
    table = fleet.table
    assert table is not None
    assert [entry.accuracy for entry in table.entries] == [entry.accuracy for entry in made_here.entries]
    assert [size.mask for size in fleet.sizes] == [0.5, 0.5]
    normalised = {"data": {"name": "digits", "clients": 4}}
    (tmp_path / "t.safetensors").unlink()
    _ = Experiment.from_config(configs.from_dict(tables | normalised, folder=tmp_path)).table
    with pytest.raises(ConfigError, match=r"model differ.*data\.normalize = false"):
        _ = Experiment.from_config(configs.from_dict(there, folder=tmp_path)).table


def test_one_mask_cut_by_depth_is_the_same_mask_in_every_depth() -> None:
    method = ELF(proxy=0.5, proxy_epochs=1, masks="one", prune_step=1.0, widths=(0.5, 1.0), depths=(1, 3))
    experiment = made(method, {"capacities": [1.0]})
    table = experiment.table
    assert table is not None
    bits = {(e.size.depth, e.size.width): dict(e.masks) for e in table.entries}
    assert set(bits) == {(1, 0.5), (1, 1.0), (3, 0.5), (3, 1.0)}
    shallow, deep = bits[1, 1.0], bits[3, 1.0]
    assert set(shallow) < set(deep)
    assert all(torch.equal(own, deep[name]) for name, own in shallow.items())
    name = "2.0.0.weight"
    whole = np.unpackbits(deep[name].numpy(), count=8 * 8 * 9).reshape(8, 8, 3, 3)
    half = np.unpackbits(bits[3, 0.5][name].numpy(), count=4 * 4 * 9).reshape(4, 4, 3, 3)
    assert (half == whole[:4, :4]).all()
    kept = sum(int(np.unpackbits(own.numpy()).sum()) for own in deep.values())
    shapes = {n: t.numel() for n, t in experiment.context.start().items() if t.dim() > 1}
    assert kept == sum(shapes.values()) - round(0.5 * sum(shapes.values()))
    check_method(ELF(proxy=0.0, sparsities=[0.0], masks="one"), network(), (0.4, 1.0), whole_runs=False)


def test_pruning_takes_several_steps_by_default_and_only_what_was_asked_for_is_in_the_table() -> None:
    """Oracle: 0.5 ** (1 / 4) of the weights are left after each of four steps, which prune a fifth at most."""
    seen: list[int] = []

    @dataclass(frozen=True)
    class Watched(ELF):
        def build(self, context: Any, sub_model: Any) -> nn.Module:
            if sub_model.ticket.job == "train":
                seen.append(sum(t.numel() for n, t in sub_model.tensors.items() if n.startswith("values/")))
            return super().build(context, sub_model)

    experiment = made(Watched(proxy=0.5, proxy_epochs=1, depths=(3,)), {"capacities": [1.0]})
    table = experiment.method.tabulate(experiment.context_for(()))
    assert [entry.size.mask for entry in table.entries] == [0.5]
    weights = sum(t.numel() for t in experiment.context_for(()).start().values() if t.dim() > 1)
    assert seen == [0, *(pytest.approx(weights * 0.5 ** (step / 4), abs=1) for step in (1, 2, 3, 4))]


def test_a_group_may_ask_for_a_sparsity() -> None:
    groups = [{"name": "sparse", "sparsity": 0.9}, {"name": "deep", "depth": 3, "sparsity": 0.5}]
    method = ELF(proxy=0.5, proxy_epochs=1, prune_step=1.0, sparsities=(0.5, 0.9), depths=(1, 3))
    experiment = made(method, {"groups": groups})
    assert experiment.size_of_group["sparse"].mask == 0.9
    deep = experiment.size_of_group["deep"]
    assert (deep.depth, deep.mask) == (3, 0.5)
    with pytest.raises(ConfigError, match=r"'sparse' has sparsity = 0\.9, which elf cannot train; it trains .* 0\.5"):
        _ = made(replace(method, sparsities=(0.5,)), {"groups": groups}).sizes
    with pytest.raises(ConfigError, match=r"'sparse' has sparsity = 0\.9, which heterofl cannot train; it masks no"):
        _ = made(HeteroFL(), {"groups": groups[:1]}).sizes


def test_the_proxy_is_its_share_of_the_data_in_use_and_few_samples_are_told(tmp_path: Path) -> None:
    method = ELF(proxy=0.5, proxy_epochs=1, prune_step=1.0, depths=(1, 3))
    experiment = made(method, {"capacities": [1.0]}, partition={"fraction": 0.5})
    proxy = experiment.context.proxy
    assert proxy is not None
    share = proxy.share(0.5)
    drawn = {tuple(sample.flatten().tolist()) for sample in share.train.batch(torch.arange(len(share.train)))[0]}
    used = [experiment.shares.share(client).train for client in range(6)]
    inside = {tuple(s.flatten().tolist()) for part in used for s in part.batch(torch.arange(len(part)))[0]}
    assert drawn <= inside
    assert (len(share.train), len(share.held_out)) == (48, 12)  # 240 / 2 / 2, a fifth of it held out
    assert any("comes from 12 samples, after training on 48" in notice for notice in experiment.notices())


def test_finished_networks_are_judged_with_the_statistics_of_the_proxy_data() -> None:
    """Oracle: torch's own running statistics over the same data, with momentum None, in a network without masks."""
    method = ELF(proxy=0.5, proxy_epochs=1, sparsities=(0.0,), depths=(1, 3))
    experiment = made(method, {"capacities": [1.0]}, normalised=True)
    context = experiment.context_for(())
    assert context.tricks.batch_norm == "calibrated"
    proxy = context.proxy
    assert proxy is not None
    share = proxy.share(0.5)
    message = method.extract(
        replace(context, sizes=(Size(1.0, depth=3),)),
        ELFState(dict(context.start()), {}),
        Client(0, 0, Size(1.0, depth=3), 0, len(share.train), 0),
    )
    message = replace(message, ticket=replace(message.ticket, job="calibrate"))
    found = proxy.calibrated(context.for_client(), method, message, share).tensors
    first = network()[0]
    x = share.train.batch(torch.arange(len(share.train)))[0].float() / 255
    expected = first[0](x).mean((0, 2, 3))
    torch.testing.assert_close(found["statistics/0.mean"], expected, rtol=1e-4, atol=1e-5)


def test_depth_and_width_and_mask_stand_in_one_table() -> None:
    method = ELF(proxy=0.5, proxy_epochs=1, sparsities=(0.0, 0.5), widths=(0.5, 1.0))
    experiment = made(method, {"groups": [{"name": "camera", "budget": {"parameters": 700}}]})
    table = experiment.table
    assert table is not None
    assert {(e.size.depth, e.size.width, e.size.mask) for e in table.entries} == {
        (depth, width, mask) for depth in (1, 2, 3) for width in (0.5, 1.0) for mask in (0.0, 0.5)
    }
    feasible = [entry for entry in table.entries if entry.cost["parameters"] <= 700]
    assert 0 < len(feasible) < len(table.entries)
    size = experiment.size_of_group["camera"]
    assert table.entry(size) == max(feasible, key=lambda entry: (entry.accuracy, -entry.cost["bytes"]))
    assert experiment.cost(size).parameters <= 700


def test_a_group_may_ask_for_a_depth_and_gets_the_best_mask_there() -> None:
    groups = [{"name": "shallow", "depth": 1}, {"name": "deep", "depth": 3}]
    experiment = made(ELF(proxy=0.5, proxy_epochs=1), {"groups": groups, "clients_per_round": [1, 2]})
    assert [(size.label, size.depth, size.mask) for size in experiment.sizes] == [
        ("shallow", 1, 0.5),
        ("deep", 3, 0.5),
    ]
    with pytest.raises(ConfigError, match="'shallow' has depth = 1, which fedavg cannot train; it does not change"):
        _ = made(FedAvg(), {"groups": groups}).sizes


def test_budgets_that_change_every_round_change_what_a_client_trains() -> None:
    groups = [{"name": "low", "budget": {"macs": 7_500}}, {"name": "high", "budget": {"macs": 1e9}}]
    experiment = made(ELF(**DENSE), {"groups": groups, "redraw": "round"})
    depths = [experiment.size_of_group[experiment.fleet.group_of(0, number).name].depth for number in range(1, 30)]
    assert set(depths) == {1, 3}


def test_options_that_make_no_sense_are_refused_together() -> None:
    with pytest.raises(MethodError, match=r"(?s)sparsities.*proxy = 2.*average = 'some'"):
        ELF(sparsities=(0.5, 0.2), average="some", proxy=2)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="fill = 'identity' with average = 'holders', which fills nothing in"):
        ELF(average="holders", fill="identity")
    with pytest.raises(MethodError, match="nothing to prune with"):
        ELF(proxy=0.0)
    with pytest.raises(MethodError, match="no blocks that can be removed"):
        _ = Experiment(data="digits", clients=4, model="mlp", method=ELF()).sizes


# --- end to end ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a law has the resumed run, and a fleet the whole way
def test_a_run_on_digits_learns_at_every_depth_resumes_and_is_cut(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "data": {"name": "digits", "clients": 9, "fraction": 1.0, "validation": 0.0},
        "model": {"name": "elf-cnn", "options": {"blocks": 2}},
        "devices": {
            "capacities": None,
            "groups": [{"name": "shallow", "depth": 1}, {"name": "deep", "depth": 2}],
            "clients_per_round": [2, 2],
        },
        "method": {"name": "elf", "proxy": 0.1, "proxy_epochs": 1, "average": "holders"},
        "training": {"learning_rate": 0.01, "batch_size": 8, "local_epochs": 2},
        "engine": {"name": "inprocess"},
        "rounds": 6,
        "evaluate_every": 6,
    }
    whole = az.run(Experiment.from_config(small.config(**changes)), out=tmp_path / "whole")
    accuracy = whole.history[-1]["accuracy"]
    assert set(accuracy) == {"shallow", "deep"}
    assert min(accuracy.values()) > 0.5
    az.run(Experiment.from_config(small.config(**changes | {"rounds": 3})), out=tmp_path / "parts")
    parts = az.run(Experiment.from_config(small.config(**changes)), out=tmp_path / "parts", resume=True)
    assert all(torch.equal(t, parts.state.tensors[n]) for n, t in whole.state.tensors.items())
    shallow = az.load(tmp_path / "whole").customize("shallow")
    weight = shallow.get_parameter("network.linear.weight")
    assert 0.2 < float((weight == 0).float().mean()) < 0.8


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[1] / "experiments" / "elf").glob("*.toml")), ids=lambda p: p.stem
)
def test_the_experiment_files_are_complete(file: Path) -> None:
    config = az.load_config(file)
    assert config.method.name in ("elf", "fedavg")


# --- what every method shares -------------------------------------------------------------------------------------


def test_max_entropy_is_the_mean_over_all_entries_of_the_divergence_from_uniform() -> None:
    """Oracle: FedMAX in numpy, on what enters the classifier after its ReLU."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    batch = Batch(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    plain = make_objective(task("classification"), Tricks(), None, classifier="2")(net, batch).item()
    found = make_objective(task("classification"), Tricks(max_entropy=10.0), None, classifier="2")(net, batch).item()
    active = np.maximum(batch.x.numpy() @ net[0].weight.detach().numpy().T + net[0].bias.detach().numpy(), 0)
    logp = active - np.log(np.exp(active).sum(1, keepdims=True))
    assert found == pytest.approx(plain + 10.0 * np.mean(0.2 * (np.log(0.2) - logp)), rel=1e-5)
    with pytest.raises(MethodError, match="none called 'head'"):
        make_objective(task("classification"), Tricks(max_entropy=1.0), None, classifier="head")(net, batch)


def test_the_classifier_is_the_outermost_layer_of_its_name() -> None:
    """Oracle: the layer itself; a block's own layers end in the same name."""
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Identity()), nn.Flatten(), nn.Linear(3, 2))
    assert classifier_in(net, "2") is net[2]
    assert classifier_in(nn.ModuleDict({"network": net}), "2") is net[2]
    with pytest.raises(MethodError, match="this network has 2 called 'head'"):
        classifier_in(nn.ModuleDict({i: nn.ModuleDict({"head": nn.Linear(1, 1)}) for i in "ab"}), "head")
    with pytest.raises(MethodError, match="this task or model has none"):
        classifier_in(net, None)


@pytest.mark.parametrize(
    "method",
    small.fast_if(
        lambda method: isinstance(method, HeteroFL),
        [FedAvg(), FedAvg(width="each"), HeteroFL(), FLANC(), FjORD(), SHeteroFL(), PriSM(), SplitMix()],
    ),
    ids=lambda m: type(m).__name__,
)
def test_max_entropy_works_with_every_method(method: Any) -> None:
    check_method(method, network(), (0.5, 1.0), {"max_entropy": 10.0})


def test_a_count_for_each_group_takes_part_in_every_round() -> None:
    config = DevicesConfig(capacities=(0.25, 0.5, 1.0), clients_per_round=(1, 2, 3))
    fleet = make_fleet(config, clients=30, seed=0)
    for number in range(1, 6):
        labels = [fleet.group_of(client, number).label for client in fleet.participants(number)]
        assert sorted(labels) == ["0.25", *["0.5"] * 2, *["1.0"] * 3]
    with pytest.raises(ConfigError, match=r"11 of 0\.25 are asked for, and there are 10"):
        make_fleet(DevicesConfig(capacities=(0.25, 0.5, 1.0), clients_per_round=(11, 1, 1)), clients=30, seed=0)
    with pytest.raises(ConfigError, match="2 counts for 3 groups"):
        configs.from_dict(TABLES | {"devices": {"capacities": [0.25, 0.5, 1.0], "clients_per_round": [1, 2]}})


TABLES: dict[str, Any] = {
    "data": {"name": "digits", "clients": 9},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
}


def test_the_classes_after_the_first_are_cut_to_the_unbalance_rate() -> None:
    data = az.Data(train=(np.zeros((2000, 2)), np.arange(2000) % 10))
    shares = split(data, 20, "classes", classes_per_client=5, unbalance=0.5, seed=0)
    for client in range(20):
        counts = np.bincount(shares.share(client).train.labels().numpy(), minlength=10)
        assert sorted(counts[counts > 0].tolist()) == [10, 10, 10, 10, 20]


@pytest.mark.parametrize("treatment", ["tracked", "calibrated"])
def test_inference_bytes_are_those_of_the_file_also_with_masks_and_statistics(tmp_path: Path, treatment: str) -> None:
    groups = [{"name": "camera", "budget": {"parameters": 700}}, {"name": "hub", "budget": {"parameters": 1e6}}]
    method = ELF(proxy=0.5, proxy_epochs=1)
    experiment = made(method, {"groups": groups}, normalised=True, rounds=1, tricks={"batch_norm": treatment})
    assert any(size.mask is not None for size in experiment.sizes)
    run = experiment.run(tmp_path / "run")
    for size in run.sizes:
        az.export(run.customize(size.label), tmp_path / "net.safetensors", experiment.signature)
        written = safetensors.torch.load_file(tmp_path / "net.safetensors")
        assert run.cost(size).inference_bytes == sum(tensor.nbytes for tensor in written.values())
