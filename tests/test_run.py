"""A run and its directory: what is written, what it says, and what it depends on."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anysize as az
import small
from anysize.data import load as load_data
from anysize.devices.groups import round_seconds
from anysize.errors import AnysizeError, CheckpointError, ConfigError, DataError
from anysize.records.directory import append_event
from anysize.records.events import read_events
from anysize.runs.runner import with_momentum

MODULE = """
import numpy as np
import anysize as az

def share(device, samples=12, classes=4):
    numbers = np.random.default_rng(device)
    x = numbers.random((samples, 1, 8, 8), dtype=np.float32)
    y = numbers.integers(0, 2 + device, samples)
    return az.Share(train=(x[4:], y[4:]), held_out=(x[:4], y[:4]))

def uncounted(device):
    return share(device)
"""


def test_an_engine_is_given_by_its_name_and_what_is_no_table_is_told() -> None:
    def made(**given: Any) -> az.Experiment:
        return az.Experiment(data="digits", clients=4, model="mlp", method="fedavg", **given)

    assert made(engine="inprocess").config.engine.name == "inprocess"
    for key in ("devices", "training", "tricks", "evaluation", "partition"):
        with pytest.raises(ConfigError, match=f"{key}: given 'much', must be a table"):
            made(**{key: "much"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> az.Run:
    """A run of three rounds with evaluation on the server and on the clients."""
    out = tmp_path_factory.mktemp("runs") / "small"
    return small.experiment(evaluation={"on": ["test", "clients"]}).run(out)


def test_a_run_directory_holds_what_the_documentation_lists(finished: az.Run) -> None:
    names = {path.name for path in finished.directory.iterdir()}
    files = {"config.toml", "environment.json", "events.jsonl", "clients.csv", "state.safetensors"}
    assert names == files | {"analysis"}


def test_the_config_in_the_directory_is_complete_and_loads_to_the_same_experiment(finished: az.Run) -> None:
    path = finished.directory / "config.toml"
    assert az.load_config(path) == finished.config
    assert "weight_decay" in path.read_text()


def test_the_environment_names_versions_and_the_data(finished: az.Run) -> None:
    environment = json.loads((finished.directory / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    data = load_data("digits")
    assert isinstance(data, az.Data)
    assert environment["data"]["checksum"] == data.checksum
    assert {"anysize", "python", "platform", "cores", "started"} <= set(environment)


def test_the_environment_names_the_commit_of_the_experiments_folder(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path / "own"), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    file = tmp_path / "own" / "own.toml"
    file.parent.mkdir()
    file.write_text(
        "rounds = 1\n[data]\nname = 'digits'\nclients = 4\n[model]\nname = 'mlp'\n[method]\nname = 'fjord'\n"
    )

    def revision(out: str) -> str | None:
        run = az.run(file, overrides=["engine.name=inprocess"], out=tmp_path / out, progress=False)
        return json.loads((run.directory / "environment.json").read_text())["revision"]

    assert revision("without") is None
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert revision("clean") == commit[:12]
    file.write_text(file.read_text() + "# changed\n")
    assert revision("changed") == commit[:12] + "+"


def test_events_begin_with_the_start_and_end_with_the_end(finished: az.Run) -> None:
    events = read_events(finished.directory / "events.jsonl")
    assert [event["event"] for event in events] == ["start", "round", "round", "round", "end"]
    start = events[0]
    assert start["metric"] == "accuracy"
    assert [size["label"] for size in start["sizes"]] == ["0.5", "1.0"]
    assert {"parameters", "macs", "training_macs", "activation_bytes", "bytes_down", "bytes_up"} <= set(
        start["sizes"][0]
    )
    assert sum(start["partition"]["samples"]) == sum(map(sum, start["partition"]["histogram"]))


def test_round_events_have_the_documented_keys(finished: az.Run) -> None:
    for number, event in enumerate(finished.history, start=1):
        assert event["event"] == "round"
        assert event["round"] == number
        assert set(event["accuracy"]) == {"0.5", "1.0"}
        assert event["metrics"]["0.5"]["accuracy"] == event["accuracy"]["0.5"]
        assert event["metrics"]["0.5"]["loss"] > 0
        assert event["bytes_down"] > 0
        assert event["bytes_up"] > 0
        assert event["seconds"] >= 0
        assert {"client", "size", "samples", "loss", "group"} <= set(event["clients"][0])
        assert sorted(client["client"] for client in event["clients"]) == list(range(6))


def test_bytes_of_a_round_are_those_of_its_clients_added_up(finished: az.Run) -> None:
    start = read_events(finished.directory / "events.jsonl")[0]
    up = {size["label"]: size["bytes_up"] for size in start["sizes"]}
    event = finished.history[0]
    # Tickets hold numbers of varying length, so that a message may differ by a few bytes from the announced one.
    assert event["bytes_up"] == pytest.approx(sum(up[client["size"]] for client in event["clients"]), rel=0.02)


def test_updates_are_folded_largest_cost_first_then_by_id(finished: az.Run) -> None:
    order = [(client["size"], client["client"]) for client in finished.history[0]["clients"]]
    samples = {client["client"]: client["samples"] for client in finished.history[0]["clients"]}
    assert len(set(samples.values())) <= 2
    expected = sorted(order, key=lambda pair: (-float(pair[0]), -samples[pair[1]], pair[1]))
    assert order == expected


def test_clients_csv_and_the_groups_summary_agree(finished: az.Run) -> None:
    rows = list(csv.DictReader((finished.directory / "clients.csv").open()))
    assert list(rows[0]) == ["round", "client", "group", "size", "samples", "accuracy", "loss"]
    assert len(rows) == 3 * 6
    last = [row for row in rows if row["round"] == "3"]
    for group, summary in finished.history[-1]["client_metrics"].items():
        values = np.array([float(row["accuracy"]) for row in last if row["group"] == group])
        assert summary["clients"] == len(values)
        assert summary["mean"] == pytest.approx(values.mean())
        assert summary["spread"] == pytest.approx(values.std())
        assert summary["worst_decile"] == pytest.approx(np.sort(values)[: max(1, -(-len(values) // 10))].mean())


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        {"name": "fedavg", "width": "each"},
        {"name": "fjord"},
        {"name": "flanc"},
        {"name": "heterofl"},
    ],
    ids=str,
)
def test_clients_judge_themselves_whatever_the_method(tmp_path: Path, method: dict[str, str]) -> None:
    run = small.experiment(method=method, rounds=1, evaluation={"on": ["clients"]}).run(tmp_path / "run")
    rows = list(csv.DictReader((run.directory / "clients.csv").open()))
    assert [int(row["client"]) for row in rows] == list(range(6))
    assert {row["size"] for row in rows} == {"0.5", "1.0"}


def test_without_evaluation_on_clients_there_are_only_column_names(tmp_path: Path) -> None:
    small.experiment(rounds=1).run(tmp_path / "run")
    assert (tmp_path / "run/clients.csv").read_text() == "round,client,group,size,samples,accuracy,loss\n"


def test_a_loaded_run_is_the_run(finished: az.Run) -> None:
    loaded = az.load(finished.directory)
    assert loaded.round == 3
    assert loaded.config == finished.config
    assert loaded.history == finished.history
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(loaded.customize(0.5)(x), finished.customize("0.5")(x))
    assert {label: m["accuracy"] for label, m in loaded.evaluate().items()} == finished.history[-1]["accuracy"]


def test_evaluating_one_size_gives_the_number_that_all_sizes_give(finished: az.Run) -> None:
    assert finished.evaluate([0.5])["0.5"] == finished.evaluate()["0.5"]


def test_a_size_is_found_by_label_or_width_and_anything_else_is_refused(finished: az.Run) -> None:
    assert finished.size("0.5") == finished.size(0.5) == finished.size("0.50")
    assert finished.size(0.3).width == 0.3
    with pytest.raises(ConfigError, match=r"unknown size 'half'"):
        finished.size("half")
    for wrong in (0, 1.5, "nan", -1):
        with pytest.raises(ConfigError, match="above 0 and at most 1"):
            finished.size(wrong)
    with pytest.raises(ConfigError, match="not both"):
        finished.customize(size=0.5, budget=az.Budget(macs=1e9))


@pytest.mark.parametrize("method", ["fedavg", "flanc", "heterofl"])
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path, method: str) -> None:
    states = []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        small.experiment(rounds=2, seed=seed, method={"name": method}).run(tmp_path / name)
        states.append((tmp_path / name / "state.safetensors").read_bytes())
    assert states[0] == states[1]
    assert states[0] != states[2]


def test_a_run_does_not_depend_on_or_change_the_global_random_state(tmp_path: Path) -> None:
    torch.manual_seed(1)
    small.experiment(rounds=1).run(tmp_path / "first")
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    torch.manual_seed(2)
    small.experiment(rounds=1).run(tmp_path / "second")
    first, second = ((tmp_path / name / "state.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_methods_with_one_seed_see_the_same_clients_data_and_first_weights(tmp_path: Path) -> None:
    changes = {"rounds": 2, "devices": {"clients_per_round": 3, "redraw": "round"}, "data": {"clients": 12}}
    seen = []
    for name in ("fedavg", "flanc", "heterofl"):
        experiment = small.experiment(method={"name": name}, tricks={"batch_norm": "tracked"}, **changes)
        run = experiment.run(tmp_path / name)
        participants = [
            sorted((client["client"], client["group"]) for client in event["clients"]) for event in run.history
        ]
        shares = [experiment.shares.share(client).train.batch(torch.arange(3))[1].tolist() for client in range(12)]
        seen.append((participants, shares, {k: v.sum().item() for k, v in experiment.context.start().items()}))
    assert seen[0] == seen[1] == seen[2]


def test_live_data_network_and_method_run_and_load_again(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0)
    x = numbers.random((60, 1, 8, 8), dtype=np.float32)
    y = (x.mean((1, 2, 3)) > 0.5).astype(np.int64)
    data = az.Data(train=(x[:40], y[:40]), test=(x[40:], y[40:]))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    experiment = az.Experiment(
        data=data, model=net, method=az.methods.HeteroFL(scaler=False), clients=4, rounds=1, name="live"
    )
    run = experiment.run(tmp_path / "run")
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert run.config.method.options == {"scaler": False, "ordered_dropout": False, "share": "all"}
    with pytest.raises(ConfigError, match=r"made with a live Sequential.*az\.load\(directory, model="):
        az.load(tmp_path / "run")
    loaded = az.load(tmp_path / "run", model=net)
    sample = torch.rand(2, 1, 8, 8)
    assert torch.equal(loaded.customize(0.5)(sample), run.customize(0.5)(sample))
    with pytest.raises(ConfigError, match=r"data: this run was made with a live Data"):
        loaded.evaluate()
    assert az.load(tmp_path / "run", model=net, data=data).evaluate() == run.evaluate()
    with pytest.raises(ConfigError, match=r"unknown live object 'modell'; did you mean 'model'"):
        az.load(tmp_path / "run", modell=net)


def test_a_live_data_function_gives_the_whole_set_or_one_devices_share(tmp_path: Path) -> None:
    def whole(samples: int = 30) -> az.Data:
        x = np.random.default_rng(0).random((samples, 4), dtype=np.float32)
        y = np.arange(samples) % 3
        return az.Data(train=(x, y), test=(x, y))

    def own(device: int) -> az.Share:
        x = np.random.default_rng(device).random((8, 4), dtype=np.float32)
        return az.Share(train=(x, np.arange(8) % 3), held_out=(x, np.arange(8) % 3))

    common: dict[str, Any] = {"model": "mlp", "method": "flanc", "clients": 3, "rounds": 1}
    common |= {"devices": {"capacities": [1.0]}}
    run = az.Experiment(data=whole, **common).run(tmp_path / "whole")
    assert set(run.history[0]["accuracy"]) == {"1.0"}
    run = az.Experiment(data=own, evaluation={"on": ["clients"]}, **common).run(tmp_path / "own")
    assert [client["samples"] for client in run.history[0]["clients"]] == [8, 8, 8]


def own_code(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (folder / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))


def test_each_device_brings_its_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_code(tmp_path, monkeypatch, "device_data")
    data = {"name": "device_data:share", "clients": 3, "options": {"samples": 20}, "fraction": 1.0, "validation": 0.0}
    run = small.experiment(data=data, evaluation={"on": ["clients"]}, rounds=2).run(tmp_path / "run")
    assert {client["samples"] for client in run.history[0]["clients"]} == {16}
    rows = list(csv.DictReader((tmp_path / "run/clients.csv").open()))
    assert [row["samples"] for row in rows] == ["4"] * 6
    assert run.customize()(torch.rand(2, 1, 8, 8)).shape == (2, 4)
    with pytest.raises(DataError, match="the data has no test part to evaluate on"):
        run.evaluate()


def test_classes_of_device_data_are_counted_over_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_code(tmp_path, monkeypatch, "uncounted_data")
    data = {"name": "uncounted_data:uncounted", "clients": 3, "fraction": 1.0, "validation": 0.0}
    experiment = small.experiment(data=data, evaluation={"on": ["clients"]})
    assert experiment.signature.outputs == 4
    narrow = {**data, "name": "uncounted_data:share", "options": {"classes": 3}}
    with pytest.raises(DataError, match=r"device 2 has labels from 0 to 3; the network has 3 outputs"):
        small.experiment(data=narrow, evaluation={"on": ["clients"]}).shares.share(2)


@pytest.mark.parametrize("treatment", ["batch", "tracked", "calibrated", "local"])
@pytest.mark.parametrize("method", ["flanc", "heterofl"])
def test_every_batch_norm_treatment_ends_in_fixed_statistics(tmp_path: Path, method: str, treatment: str) -> None:
    data = load_data("digits")
    assert isinstance(data, az.Data)
    run = az.Experiment(
        data=data,
        model=small.normalised_network(),
        method=method,
        clients=4,
        partition={"fraction": 0.2, "validation": 0.2},
        devices={"capacities": [0.5, 1.0]},
        tricks={"batch_norm": treatment},
        evaluation={"on": ["test", "clients"]},
        rounds=2,
        evaluate_every=1,
    ).run(tmp_path / "run")
    x = torch.rand(8, 1, 8, 8)
    for size in ("0.5", "1.0", "0.75"):
        network = run.customize(size)
        assert not network.training
        alone = torch.cat([network(sample.unsqueeze(0)) for sample in x])
        torch.testing.assert_close(alone, network(x), rtol=1e-4, atol=1e-5)
    assert {label: m["accuracy"] for label, m in run.evaluate().items()} == run.history[-1]["accuracy"]
    kept = sorted(path.name for path in (tmp_path / "run").glob("kept/*"))
    assert kept == ([f"{client}-2.safetensors" for client in range(4)] if treatment == "local" else [])


def test_server_momentum_adds_what_is_left_of_the_steps_before() -> None:
    method = small.experiment(method={"name": "heterofl"}).method
    state = type(method.init(small.experiment(method={"name": "heterofl"}).context))
    numbers = np.random.default_rng(0)
    aggregated = [numbers.normal(size=3).astype(np.float32) for _ in range(4)]
    velocity, place = np.zeros(3, np.float32), aggregated[0]
    current, momentum = state({"w": torch.from_numpy(place.copy())}), {}
    for target in aggregated[1:]:
        current, momentum = with_momentum(current, state({"w": torch.from_numpy(target)}), momentum, 0.6)
        velocity = np.float32(0.6) * velocity + (target - place)
        place = place + velocity
        np.testing.assert_allclose(current.tensors["w"].numpy(), place, rtol=1e-5)


def test_server_momentum_changes_a_run_from_its_second_round(tmp_path: Path) -> None:
    histories = []
    for factor in (0.0, 0.5):
        run = small.experiment(method={"name": "fedavg"}, tricks={"server_momentum": factor}).run(
            tmp_path / str(factor)
        )
        histories.append([event["metrics"]["0.5"]["loss"] for event in run.history])
    assert histories[0][0] == histories[1][0]
    assert histories[0][1] != histories[1][1]


def test_redrawn_capacities_change_from_round_to_round(tmp_path: Path) -> None:
    run = small.experiment(devices={"redraw": "round"}, rounds=4).run(tmp_path / "run")
    sizes = [{c["client"]: c["size"] for c in event["clients"]} for event in run.history]
    assert any(sizes[0][client] != sizes[i][client] for client in range(6) for i in (1, 2, 3))


def test_a_round_with_nobody_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    run = small.experiment(devices={"available": 0.15}, data={"clients": 2}, rounds=6).run(tmp_path / "run")
    empty = [event for event in run.history if not event["clients"]]
    assert 0 < len(empty) < 6
    for event in empty:
        assert event["train_loss"] is None
        assert event["bytes_down"] == event["bytes_up"] == 0
        before = [other for other in run.history if other["round"] == event["round"] - 1]
        assert all(other["accuracy"] == event["accuracy"] for other in before)


def test_virtual_time_is_the_slowest_participants(tmp_path: Path) -> None:
    speeds = {"macs_per_second": [1e6, 1e5], "bytes_per_second_down": 1e4, "bytes_per_second_up": 5e3}
    run = small.experiment(devices=speeds, training={"local_epochs": 2}, rounds=1).run(tmp_path / "run")
    sizes = {size["label"]: size for size in read_events(run.directory / "events.jsonl")[0]["sizes"]}
    seconds = []
    for client in run.history[0]["clients"]:
        cost, speed = sizes[client["size"]], {"0.5": 1e6, "1.0": 1e5}[client["size"]]
        work = cost["training_macs"] * client["samples"] * 2 / speed
        seconds.append(cost["bytes_down"] / 1e4 + work + cost["bytes_up"] / 5e3)
    assert run.history[0]["virtual_seconds"] == pytest.approx(max(seconds))
    groups = {group.name: group for group in run.experiment.fleet.groups}
    assert round_seconds(groups["1.0"], 1e5, 1e4, 5e3) == pytest.approx(3.0)


def test_a_run_without_speeds_has_no_virtual_time(finished: az.Run) -> None:
    assert "virtual_seconds" not in finished.history[0]


def test_numbers_that_are_not_finite_become_null_in_events(tmp_path: Path) -> None:
    append_event(tmp_path, {"event": "round", "metrics": {"1.0": {"loss": float("nan"), "r2": [-float("inf"), 1.0]}}})
    assert json.loads((tmp_path / "events.jsonl").read_text())["metrics"] == {"1.0": {"loss": None, "r2": [None, 1.0]}}


def test_a_folder_that_holds_a_run_or_other_files_is_left_alone(tmp_path: Path) -> None:
    experiment = small.experiment(rounds=1)
    experiment.run(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"resume=True.*out=.*overwrite=True"):
        experiment.run(tmp_path / "run")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/config.toml").write_text("mine = true\n")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="not a run's"):
            experiment.run(tmp_path / "thesis", overwrite=overwrite)
    assert (tmp_path / "thesis/config.toml").read_text() == "mine = true\n"


def test_overwriting_replaces_the_run_and_keeps_what_no_run_writes(tmp_path: Path) -> None:
    small.experiment(rounds=2).run(tmp_path / "run")
    (tmp_path / "run/notes.txt").write_text("keep me")
    run = small.experiment(rounds=1).run(tmp_path / "run", overwrite=True)
    assert [event["round"] for event in run.history] == [1]
    assert (tmp_path / "run/notes.txt").read_text() == "keep me"


def test_a_second_run_in_one_directory_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    refused: list[str] = []

    def intrude(event: dict[str, Any]) -> None:
        if event["event"] == "round" and not refused:
            for options in ({"resume": True}, {"overwrite": True}):
                with pytest.raises(CheckpointError, match="another process is running in") as error:
                    small.experiment().run(tmp_path / "run", **options)
                refused.append(str(error.value))

    run = small.experiment().run(tmp_path / "run", on_event=intrude)
    assert len(refused) == 2
    assert run.round == 3


def test_a_running_run_can_be_loaded_and_evaluated(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def look(event: dict[str, Any]) -> None:
        if event["event"] == "client" and event["round"] == 2 and not seen:
            seen.append({"round": az.load(tmp_path / "run").round, "metrics": az.load(tmp_path / "run").evaluate()})

    run = small.experiment().run(tmp_path / "run", on_event=look)
    assert seen[0]["round"] == 1
    assert seen[0]["metrics"] == run.history[0]["metrics"]


def test_diverging_training_is_one_clear_error_and_keeps_the_rounds_before(tmp_path: Path) -> None:
    with pytest.raises(AnysizeError, match=r"diverged.*learning_rate"):
        small.experiment(training={"learning_rate": 1e9}, rounds=9).run(tmp_path / "run")
    assert az.load(tmp_path / "run").round >= 0


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize("verb", ["init", "extract", "build", "loss", "pack", "aggregate", "customize"])
@pytest.mark.parametrize("answer", [fails, lambda *_, **__: None], ids=["raises", "rubbish"])
def test_a_method_that_fails_is_named_and_nothing_else_breaks(
    tmp_path: Path, verb: str, answer: Callable[..., Any]
) -> None:
    kind = type("Mine", (az.methods.HeteroFL,), {verb: answer})
    data, devices = {"name": "digits", "clients": 2, "fraction": 0.05}, {"capacities": [0.5, 1.0]}
    experiment = az.Experiment(data=data, devices=devices, model="mlp", method=kind(), rounds=1)
    with pytest.raises(AnysizeError, match=r"Look at your method '.*Mine'") as error:
        experiment.run(tmp_path / "run")
    assert (answer is fails) == ("ZeroDivisionError: mine" in str(error.value))


def test_worker_processes_end_in_the_same_file(tmp_path: Path) -> None:
    states = []
    for name in ("inprocess", "processes"):
        engine = {"name": name} | ({"workers": 2} if name == "processes" else {})
        small.experiment(engine=engine, rounds=2, evaluation={"on": ["test", "clients"]}).run(tmp_path / name)
        states.append((tmp_path / name / "state.safetensors").read_bytes())
    assert states[0] == states[1]


def test_live_objects_run_in_this_process_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    data, net = load_data("digits"), small.normalised_network()
    assert isinstance(data, az.Data)
    experiment = az.Experiment(data=data, model=net, method="fedavg", clients=4, rounds=1, engine={"name": "processes"})
    experiment.run(tmp_path / "run", on_event=lambda event: said.append(event.get("text", "")))
    assert any("in this process" in text for text in said)


def test_local_norms_of_a_client_whose_capacity_changed_start_anew(tmp_path: Path) -> None:
    run = az.Experiment(
        data="digits",
        clients=4,
        model={"name": "small-cnn", "options": {"channels": [8, 16]}},
        method="heterofl",
        partition={"fraction": 0.2, "validation": 0.2},
        devices={"capacities": [0.25, 1.0], "redraw": "round"},
        tricks={"batch_norm": "local"},
        evaluation={"on": ["clients"]},
        rounds=4,
        evaluate_every=2,
    ).run(tmp_path / "run")
    sizes = {(c["client"], c["size"]) for event in run.history for c in event["clients"]}
    assert len(sizes) > 4  # some client took part at both capacities
