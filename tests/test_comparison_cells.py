"""The cells of a comparison: what each one is, what is tuned, who runs it, and that none is run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anysize as az
import small
from anysize import config as configs
from anysize.comparisons import locks
from anysize.comparisons.cells import cells
from anysize.comparisons.compare import PLAN, _of_shard, _write_plan
from anysize.comparisons.outcomes import held_out
from anysize.errors import CheckpointError, ConfigError
from anysize.methods import HeteroFL
from test_pool import linux

FILE = """
name = "t"
rounds = 2
evaluate_every = 1
data = { name = "digits", clients = 6, fraction = 0.2, validation = 0.2 }
model = { name = "mlp", options = { hidden = [16, 8] } }
devices.capacities = [0.5, 1.0]
training = { learning_rate = 0.05, batch_size = 16 }

[compare]
methods = [
    "heterofl",
    { name = "fedavg", label = "FedAvg, each", options = { width = "each" }, tricks.masked_loss = true },
    { name = "fedavg", label = "FedAvg, slow", training.learning_rate = 0.001, tune = {} },
]
seeds = [0, 1]
tune = { "training.learning_rate" = [0.05, 0.1] }

[compare.settings]
iid = { data.split = "iid" }
[compare.settings."Dirichlet 0.3"]
data = { split = "dirichlet", alpha = 0.3 }
devices = { distribution = "two-type", distribution_options.weak = 0.5 }
"""


def test_a_cell_is_the_file_with_its_setting_its_method_and_its_seed() -> None:
    found = {cell.path: cell for cell in cells(configs.loads(FILE))}
    assert len(found) == 12
    each = found["Dirichlet-0.3/FedAvg-each/seed-1"].config
    assert (each.seed, each.method.options, each.tricks.masked_loss) == (1, {"width": "each"}, True)
    assert (each.data.split, each.data.alpha, each.devices.capacities) == ("dirichlet", 0.3, (0.5, 1.0))
    assert each.compare is None
    plain = found["iid/heterofl/seed-0"].config
    assert (plain.data.split, plain.tricks.masked_loss, plain.devices.distribution) == ("iid", None, None)
    assert found["iid/FedAvg-slow/seed-0"].config.training.learning_rate == 0.001
    assert list(found)[:2] == ["iid/heterofl/seed-0", "iid/FedAvg-each/seed-0"]  # all of a seed before the next
    assert [path.endswith("seed-0") for path in found] == [True] * 6 + [False] * 6


def test_without_a_method_table_no_entry_has_the_options_of_the_first(tmp_path: Path) -> None:
    entries = """
    { name = "fedavg", label = "each", options = { width = "each" } }, { name = "fedavg", label = "weakest" }, "fedavg"
    """
    config = configs.loads(f"{FILE.partition('[compare]')[0]}[compare]\nmethods = [{entries}]")
    _write_plan(config, tmp_path)
    for read in (config, configs.load(tmp_path / PLAN)):  # as a file, and as another process reads it
        assert read.method.options == {"width": "each"}  # what `run` and `plan` take
        assert [cell.config.method.options for cell in cells(read)] == [{"width": "each"}, {}, {}]


def test_tuning_runs_are_on_the_first_seed_and_judged_by_clients_alone() -> None:
    found = {cell.path: cell for cell in cells(configs.loads(FILE))}
    trials = found["iid/heterofl/seed-1"].trials
    assert [trial.path for trial in trials] == [f"iid/heterofl/tuning/learning_rate={rate}" for rate in (0.05, 0.1)]
    assert [trial.config.training.learning_rate for trial in trials] == [0.05, 0.1]
    for trial in trials:
        assert (trial.config.seed, trial.config.evaluation.on, trial.config.evaluate_every) == (0, ("clients",), 2)
    assert found["iid/FedAvg-slow/seed-1"].trials == ()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": ["a b", "a-b"]}, "'a b' and 'a-b' would share a folder"),
        ({"methods": [{"name": "flanc", "tricsk": {}}]}, "did you mean 'tricks'"),
        ({"methods": ["flanc", {"name": "flanc"}]}, "'flanc' occurs more than once; give each a label"),
        ({"settings": {"x": {"method.name": "fjord"}}}, "method cannot be changed here"),
        ({"settings": {"x": 3}}, "must hold tables"),
        ({"settings": {"x": {"data.splti": "iid"}}}, "flanc in x: data: unknown key 'splti'; did you mean 'split'"),
        ({"tune": {"training.learning_rate": 0.1}}, "must give each key a list"),
        ({"tune": {"data.alpha": [0.1]}}, "data.alpha cannot be chosen"),
        ({"methods": [{"name": "flanc", "settings": ["iid"]}], "settings": {"idd": {}}}, "did you mean 'idd'"),
        ({"baseline": "fjord"}, "'fjord' is none of the labels: flanc"),
    ],
)
def test_mistakes_in_the_table_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cells(small.config(compare={"methods": ["flanc"]} | changes))


def test_long_labels_have_short_folders_of_their_own() -> None:
    labels = ["x" * 300, "x" * 301, "ä" * 300]
    methods = [{"name": "flanc", "label": label} for label in labels]
    found = cells(small.config(compare={"methods": methods, "settings": {"s" * 300: {}}}))
    assert [cell.label for cell in found] == labels
    assert len({cell.path for cell in found}) == 3
    assert max(len(part.encode()) for cell in found for part in cell.path.split("/")) <= 100


def test_a_file_with_a_comparison_needs_no_method_and_can_be_run(tmp_path: Path) -> None:
    config = configs.loads(FILE, ["rounds=1"])
    assert config.method.name == "heterofl"
    run = az.Experiment.from_config(config).run(tmp_path / "run")
    assert "compare" not in (run.directory / "config.toml").read_text()
    assert configs.loads(configs.dumps(config)) == config


def test_an_entry_may_run_in_some_settings_and_a_call_may_run_some_cells(tmp_path: Path) -> None:
    settings = {"one": {"rounds": 1}, "two": {"rounds": 2}}
    methods: list[Any] = ["fedavg", {"name": "heterofl", "settings": ["two"]}]
    config = small.config(compare={"methods": methods, "settings": settings, "seeds": [0, 1]})
    made = az.compare(config, out=tmp_path, only="one/*/seed-0", jobs=1)
    assert [outcome.path for outcome in made.outcomes] == ["one/fedavg/seed-0"]
    assert set(made.missing) == {"one/fedavg/seed-1"} | {
        f"two/{m}/seed-{s}" for m in ("fedavg", "heterofl") for s in (0, 1)
    }
    with pytest.raises(ConfigError, match="no cell's path matches"):
        az.compare(config, out=tmp_path, only="one/heterofl/*", jobs=1)


def test_shards_are_all_cells_once_and_keep_tuning_together() -> None:
    every = cells(configs.loads(FILE))
    parts = [_of_shard(every, (number, 3)) for number in (1, 2, 3)]
    assert sorted(cell.path for part in parts for cell in part) == sorted(cell.path for cell in every)
    for part in parts:
        tuned = {(cell.setting, cell.label) for cell in part if cell.trials}
        assert sum(cell.trials != () for cell in part) == 2 * len(tuned)  # both seeds


# Tuning


def untouchable(**options: Any) -> az.Data:
    """Samples whose test part may not be read, but for the first, whose shape is looked at when data is loaded."""

    class Test(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            if index:
                raise AssertionError("the test data was read")
            return torch.zeros(4), 0

    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(200, 4, generator=random), torch.randint(0, 2, (200,), generator=random)
    return az.Data(train=torch.utils.data.TensorDataset(x, y), test=Test(), classes=2)


def test_tuning_never_reads_test_data_and_takes_the_best_by_held_out_data(tmp_path: Path) -> None:
    experiment = az.Experiment(
        data=untouchable,
        model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        method="fedavg",
        clients=3,
        partition={"validation": 0.3},
        devices={"capacities": [0.5, 1.0]},
        rounds=1,
    )
    seen: list[str] = []
    with pytest.raises(ConfigError, match="the test data was read"):
        az.compare(
            experiment,
            ["heterofl"],
            tune={"training.learning_rate": [0.01, 0.5, 0.1]},
            out=tmp_path,
            on_event=lambda path, event: seen.append(path),
        )
    trials = {rate: tmp_path / f"heterofl/tuning/learning_rate={rate}" for rate in (0.01, 0.5, 0.1)}
    scores = {rate: held_out(directory) for rate, directory in trials.items()}  # all three came to their end
    assert "heterofl/seed-0" in seen
    saved = configs.loads((tmp_path / "heterofl/seed-0/config.toml").read_text())
    assert saved.training.learning_rate == max(scores, key=lambda rate: scores[rate])


def test_the_tuned_value_is_the_one_that_clients_found_best_and_the_page_says_so(tmp_path: Path) -> None:
    config = small.config(rounds=2, evaluate_every=2, method={"name": "fedavg"})
    rates = [0.0001, 0.3]
    made = az.compare(config, ["fedavg"], seeds=[0, 1], tune={"training.learning_rate": rates}, out=tmp_path, jobs=1)
    scores = {}
    for rate in rates:
        rows = (tmp_path / f"fedavg/tuning/learning_rate={rate}/clients.csv").read_text().splitlines()
        place = rows[0].split(",").index("accuracy")
        scores[rate] = sum(float(row.split(",")[place]) for row in rows[1:]) / len(rows[1:])
    best = max(rates, key=lambda rate: scores[rate])
    for seed in (0, 1):
        assert az.load(tmp_path / f"fedavg/seed-{seed}").config.training.learning_rate == best
    assert any(f"with seed 0 alone and 2 rounds: {best} for fedavg" in line for line in made.statements)


# One's own work


@dataclass(frozen=True)
class Mine(HeteroFL):
    """A method of one's own."""


def test_live_objects_are_compared_and_variants_of_a_method_have_labels(tmp_path: Path) -> None:
    experiment = small.experiment(rounds=1, data={"validation": 0.2}, evaluation={"on": ["clients"]})
    methods = [Mine(scaler=False), "heterofl", {"name": "heterofl", "label": "plain", "options": {"scaler": False}}]
    made = az.compare(experiment, methods, out=tmp_path, baseline="plain")
    assert made.methods == ("Mine", "heterofl", "plain")
    assert made.judged_on == "clients"
    (mine,) = [entry for entry in made.differences if (entry.method, entry.size) == ("Mine", "mean of sizes")]
    assert mine.mean == 0.0  # the same method with the same options
    judged = az.load(tmp_path / "plain/seed-0").history[-1]["client_metrics"]
    row = made.row("plain", "0.5")
    assert row is not None
    assert row.mean == pytest.approx(judged["0.5"]["mean"])
    assert (tmp_path / "plain/seed-0/report.html").is_file()


def test_a_cell_that_fails_is_told_and_the_others_are_finished(tmp_path: Path) -> None:
    config = small.config(rounds=1, model={"name": "mlp", "options": {"hidden": [16, 8]}})
    made = az.compare(config, ["fedavg", {"name": "oat", "tricks": {"attack_steps": 1}}], out=tmp_path, jobs=1)
    assert made.methods == ("fedavg",)
    assert list(made.failures) == ["oat/seed-0"]
    assert "batch" in made.failures["oat/seed-0"]
    again: list[str] = []
    az.compare(config, ["fedavg", "oat"], out=tmp_path, on_event=lambda path, event: again.append(event["event"]))
    assert "failed" in again  # it is tried again the next time


# Several processes


def events_of(folder: Path, kind: str) -> dict[str, int]:
    """How many events of a kind each run has had."""
    found = {}
    for path in folder.rglob("events.jsonl"):
        text = path.read_text()
        lines = [json.loads(line)["event"] for line in text[: text.rfind("\n") + 1].splitlines()]
        found[path.parent.relative_to(folder).as_posix()] = lines.count(kind)
    return found


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    file = folder / "t.toml"
    file.write_text(FILE.replace("[compare.settings]", 'target = 0.1\nbaseline = "heterofl"\n[compare.settings]'))
    command = [sys.executable, "-m", "anysize", "compare", str(file), "--out", str(folder / "all"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_cell_that_another_process_holds_is_left_to_it(tmp_path: Path) -> None:
    with locks.held(tmp_path, "iid/flanc/seed-0") as ours:
        assert ours
        with locks.held(tmp_path, "iid/flanc/seed-0") as second:
            assert not second
        with locks.held(tmp_path, "iid/flanc/seed-1") as other:
            assert other
        script = (
            "import sys, pathlib; from anysize.comparisons import locks\n"
            "with locks.held(pathlib.Path(sys.argv[1]), 'iid/flanc/seed-0') as ours: print(ours)"
        )
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
        assert done.stdout == "False\n"
    with locks.held(tmp_path, "iid/flanc/seed-0") as ours:
        assert ours


def compared(folder: Path) -> None:
    """Two methods with two seeds and a tuned rate: four cells and four tuning runs, in the process that calls it."""
    tune = {"training.learning_rate": [0.1, 0.2]}
    config = small.config(rounds=2, evaluate_every=2, data={"fraction": 0.1})
    az.compare(config, ["heterofl", "fedavg"], seeds=[0, 1], tune=tune, out=folder, jobs=1)


def forked(folder: Path) -> BaseProcess:
    """A process like this one, with everything loaded, that compares."""
    process = get_context("fork").Process(target=compared, args=(folder,))
    process.start()
    return process


@linux
def test_two_processes_share_the_cells(tmp_path: Path) -> None:
    other = forked(tmp_path)
    compared(tmp_path)
    other.join(60)
    assert other.exitcode == 0
    starts = events_of(tmp_path, "start")
    assert len(starts) == 8
    assert set(starts.values()) == set(events_of(tmp_path, "end").values()) == {1}
    assert set(events_of(tmp_path, "resume").values()) == {0}


@linux
def test_a_killed_comparison_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    other = forked(tmp_path)
    wait_for(lambda: sum(events_of(tmp_path, "end").values()) >= 2)
    other.kill()
    other.join(60)
    ended = {path for path, count in events_of(tmp_path, "end").items() if count}
    before = {path: (tmp_path / path / "events.jsonl").read_text() for path in ended}
    assert 2 <= len(before) < 8
    compared(tmp_path)
    assert {path: (tmp_path / path / "events.jsonl").read_text() for path in before} == before
    ends, rounds = events_of(tmp_path, "end"), events_of(tmp_path, "round")
    assert len(ends) == 8
    assert set(ends.values()) == {1}
    assert sum(rounds.values()) <= 2 * 8 + 1  # at most the round that was killed is there twice


@pytest.mark.slow
def test_two_commands_share_the_cells_and_both_give_the_whole_result(tmp_path: Path) -> None:
    both = [started(tmp_path, "--jobs", "1", "--json") for _ in range(2)]
    results = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    first, second = (json.loads(out) for out, _ in results)
    assert first == second
    starts = events_of(tmp_path / "all", "start")
    assert len(starts) == 12 + 8
    assert set(starts.values()) == {1}
    assert set(events_of(tmp_path / "all", "resume").values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_comparison_that_was_ended_goes_on_and_repeats_nothing(tmp_path: Path, end: signal.Signals) -> None:
    process = started(tmp_path, "--jobs", "2")
    wait_for(lambda: sum(events_of(tmp_path / "all", "end").values()) >= 2)
    process.send_signal(end)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if end == signal.SIGINT else -signal.SIGKILL)
    if end == signal.SIGINT:
        assert "continue with the same command" in said
        assert "Traceback" not in said
    wait_for(lambda: all(is_free(tmp_path / "all", path) for path in events_of(tmp_path / "all", "end")))
    before = {path for path, count in events_of(tmp_path / "all", "end").items() if count}
    assert len(before) < 20
    stamps = {path: (tmp_path / "all" / path / "events.jsonl").stat().st_mtime_ns for path in before}
    again = started(tmp_path, "--jobs", "2", "--json")
    out, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert set(events_of(tmp_path / "all", "end").values()) == {1}
    assert {path: (tmp_path / "all" / path / "events.jsonl").stat().st_mtime_ns for path in before} == stamps
    rounds = events_of(tmp_path / "all", "round")
    resumes = events_of(tmp_path / "all", "resume")
    assert all(count == 2 for path, count in rounds.items() if not resumes[path])
    assert len(json.loads(out)["cells"]) == 12


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def is_free(folder: Path, path: str) -> bool:
    with locks.held(folder, path) as ours:
        return ours


def test_an_ended_comparison_goes_on_in_this_process_and_repeats_nothing(tmp_path: Path) -> None:
    class EndedError(BaseException):
        pass

    def end(path: str, event: dict[str, Any]) -> None:
        if path == "fedavg/seed-0" and event["event"] == "client" and event["round"] == 2:
            raise EndedError

    config, tune = small.config(rounds=2, evaluate_every=1), {"training.learning_rate": [0.1, 0.2]}
    with pytest.raises(EndedError):
        az.compare(config, ["heterofl", "fedavg"], tune=tune, out=tmp_path, on_event=end)
    az.compare(config, ["heterofl", "fedavg"], tune=tune, out=tmp_path, jobs=1)
    assert set(events_of(tmp_path, "round").values()) == {2}  # round 2 was not finished, so it was not repeated
    assert {path: count for path, count in events_of(tmp_path, "resume").items() if count} == {"fedavg/seed-0": 1}


def test_cells_run_in_processes_are_the_cells_run_here(tmp_path: Path) -> None:
    config = small.config(rounds=1, evaluate_every=1)
    az.compare(config, ["heterofl"], seeds=[0, 1], out=tmp_path / "apart", jobs=2)
    az.compare(config, ["heterofl"], seeds=[0, 1], out=tmp_path / "here", jobs=1)
    for seed in (0, 1):
        states = [tmp_path / place / f"heterofl/seed-{seed}/state.safetensors" for place in ("apart", "here")]
        assert states[0].read_bytes() == states[1].read_bytes()
    assert not list((tmp_path / "apart/.cells").glob("*.log"))
    # Nothing is left to do, and nothing is done.
    before = os.stat(tmp_path / "here/heterofl/seed-0").st_mtime_ns
    az.compare(config, ["heterofl"], seeds=[0, 1], out=tmp_path / "here")
    assert os.stat(tmp_path / "here/heterofl/seed-0").st_mtime_ns == before


def test_other_rounds_are_refused_too_since_a_schedule_spans_them(tmp_path: Path) -> None:
    az.compare(small.config(rounds=1), ["fedavg"], out=tmp_path, jobs=1)
    with pytest.raises(CheckpointError, match=r"rounds: 1 -> 2"):
        az.compare(small.config(rounds=2), ["fedavg"], out=tmp_path, jobs=1)


@pytest.mark.parametrize("name", ["fashion", "cifar"])
def test_the_benchmark_has_every_method_in_every_setting_with_three_seeds(name: str) -> None:
    config = configs.load(Path(__file__).parents[1] / f"experiments/benchmark/{name}.toml")
    assert config.compare is not None
    found = cells(config)
    methods = {cell.config.method.name for cell in found}
    assert methods == {
        "fedavg",
        "heterofl",
        "splitmix",
        "flanc",
        "fjord",
        "sheterofl",
        "ladder",
        "prism",
        "fedhm",
        "origdrop",
        "fedrolex",
        "fiarse",
    }
    for setting in config.compare.settings:
        own = [cell for cell in found if cell.setting == setting]
        assert {cell.seed for cell in own} == {0, 1, 2}
        assert {cell.config.method.name for cell in own} == methods
        assert all(len(cell.trials) == 3 and cell.trials[0].config.rounds == 40 for cell in own)
        equal = [cell.config.tricks.model_dump(exclude_none=True) for cell in own]
        assert all(tricks == equal[0] for tricks in equal)
        assert bool(equal[0]) != setting.endswith("papers")
