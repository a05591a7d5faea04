"""Several methods on one experiment: fair, resumable, and a table that adds up."""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import anysize as az
import small
from anysize.errors import AnysizeError, CheckpointError, ConfigError

METHODS = ["flanc", "heterofl", "fedavg"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> az.Comparison:
    """Three methods with two seeds."""
    folder = tmp_path_factory.mktemp("compare")
    config = small.config(rounds=2, evaluate_every=2, method={"name": "flanc", "orthogonality": 1.0})
    return az.compare(config, METHODS, seeds=[0, 3], out=folder / "all", jobs=1)


def test_every_method_and_seed_has_its_own_run(compared: az.Comparison) -> None:
    for method, seed in itertools.product(METHODS, (0, 3)):
        run = az.load(compared.directory / method / f"seed-{seed}")
        assert run.round == 2
        assert (run.config.method.name, run.config.seed) == (method, seed)
        assert (run.directory / "report.html").is_file()


def test_options_of_the_file_are_its_own_methods_alone(compared: az.Comparison) -> None:
    options = {name: az.load(compared.directory / f"{name}/seed-0").config.method.options for name in METHODS}
    assert options.pop("flanc")["orthogonality"] == 1.0
    sliced = {"scaler": True, "ordered_dropout": False, "share": "all"}
    assert options == {"heterofl": sliced, "fedavg": {"width": "weakest"}}


def test_a_run_of_a_comparison_is_the_run_made_alone(compared: az.Comparison, tmp_path: Path) -> None:
    for method in ("heterofl", "fedavg"):
        tables: dict[str, Any] = {"rounds": 2, "evaluate_every": 2, "seed": 3, "method": {"name": method}}
        small.experiment(**tables).run(tmp_path / method)
        alone = (tmp_path / method / "state.safetensors").read_bytes()
        assert alone == (compared.directory / f"{method}/seed-3/state.safetensors").read_bytes()


def test_the_table_holds_mean_and_deviation_of_what_the_runs_measured(compared: az.Comparison) -> None:
    assert [(row.method, row.size) for row in compared.rows] == [
        ("flanc", "0.5"),
        ("flanc", "1.0"),
        ("flanc", "mean of sizes"),
        ("heterofl", "0.5"),
        ("heterofl", "1.0"),
        ("heterofl", "mean of sizes"),
        ("fedavg", "0.5"),
        ("fedavg", "mean of sizes"),
    ]
    for row in (row for row in compared.rows if row.size != "mean of sizes"):
        runs = [az.load(compared.directory / f"{row.method}/seed-{seed}") for seed in (0, 3)]
        values = [run.history[-1]["accuracy"][row.size] for run in runs]
        assert list(row.values) == values
        assert row.mean == pytest.approx(sum(values) / 2)
        assert row.std == pytest.approx(statistics.stdev(values))
        cost = runs[0].cost(runs[0].size(row.size))
        assert (row.parameters, row.macs) == (cost.parameters, cost.macs)
        assert row.bytes == cost.bytes


def test_json_and_csv_hold_the_same_numbers(compared: az.Comparison) -> None:
    stored = json.loads((compared.directory / "compare.json").read_text())
    assert stored == json.loads(json.dumps(compared.to_json()))
    assert stored["metric"] == "accuracy"
    assert stored["seeds"] == [0, 3]
    lines = list(csv.DictReader((compared.directory / "compare.csv").open()))
    assert [float(line["mean"]) for line in lines] == [row.mean for row in compared.rows]
    assert [float(line["accuracy seed 3"]) for line in lines] == [row.values[1] for row in compared.rows]


def test_asking_again_runs_only_what_is_new_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class StoppedError(BaseException):
        pass

    seen: list[tuple[str, str]] = []

    def stop(name: str, event: dict[str, Any]) -> None:
        if name == "heterofl/seed-0" and event["event"] == "client" and event["round"] == 2:
            raise StoppedError

    config = small.config(rounds=2)
    with pytest.raises(StoppedError):
        az.compare(config, ["fedavg", "heterofl"], out=tmp_path / "all", on_event=stop)
    made = az.compare(
        config,
        ["fedavg", "heterofl", "flanc"],
        out=tmp_path / "all",
        on_event=lambda name, event: seen.append((name, event["event"])),
    )
    assert ("fedavg/seed-0", "finished before") in seen
    assert ("fedavg/seed-0", "round") not in seen
    assert seen.count(("heterofl/seed-0", "round")) == 1
    assert seen.count(("flanc/seed-0", "round")) == 2
    assert all(row.std is None for row in made.rows)
    small.experiment(rounds=2, method={"name": "heterofl"}).run(tmp_path / "alone")
    alone = (tmp_path / "alone/state.safetensors").read_bytes()
    assert alone == (tmp_path / "all/heterofl/seed-0/state.safetensors").read_bytes()


OWN_METHOD = """
from dataclasses import dataclass
from anysize.methods import HeteroFL

@dataclass(frozen=True)
class Mine(HeteroFL):
    pass
"""


@pytest.mark.parametrize("engine", [pytest.param("inprocess", marks=pytest.mark.slow), "processes"])
def test_a_method_beside_the_experiment_file_is_compared_from_any_folder(tmp_path: Path, engine: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own_method.py").write_text(OWN_METHOD)
    source = small.file(tmp_path, rounds=1, engine={"name": engine, "workers": 2})
    methods = ["--methods", "heterofl,own_method:Mine"]
    command = [sys.executable, "-m", "anysize", "compare", str(source), *methods, "--json"]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = {(row["method"], row["size"]): row["values"] for row in json.loads(done.stdout)["rows"]}
    assert len(values) == 6
    for size in ("0.5", "1.0"):  # one method under two names
        assert values["own_method:Mine", size] == values["heterofl", size]


@pytest.mark.parametrize(
    "methods, seeds, tables, message",
    [
        (["flank"], [], {}, r"unknown method 'flank'; did you mean 'flanc'"),
        ([], [], {}, "none given"),
        (["flanc", "flanc"], [1, 1], {}, r"1 occurs more than once"),
        (["flanc"], [-1], {}, "given -1, must be 0 or more"),
        (
            ["flanc"],
            [],
            {"compare": {"tune": {"training.learning_rate": [0.1]}}, "data": {"validation": 0.0}},
            "held-out",
        ),
    ],
)
def test_what_could_only_fail_later_is_refused_at_once(
    tmp_path: Path, methods: list[str], seeds: list[int], tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        az.compare(small.config(**tables), methods, seeds=seeds, out=tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_comparison_of_another_experiment_is_not_mixed_in(tmp_path: Path) -> None:
    az.compare(small.config(rounds=1), ["fedavg"], out=tmp_path / "all", jobs=1)
    with pytest.raises(CheckpointError, match=r"another experiment(.|\n)*learning_rate"):
        az.compare(small.config(rounds=1, training={"learning_rate": 0.2}), ["fedavg"], out=tmp_path / "all", jobs=1)
    with pytest.raises(AnysizeError, match="holds a run itself"):
        az.compare(small.config(rounds=1), ["fedavg"], out=tmp_path / "all/fedavg/seed-0")


def test_the_mean_over_sizes_is_taken_per_seed(compared: az.Comparison) -> None:
    mean, std = compared.averages()["flanc"]
    rows = [row.values for row in compared.rows if row.method == "flanc" and row.size != "mean of sizes"]
    by_seed = [sum(values) / len(values) for values in zip(*rows)]
    assert mean == pytest.approx(statistics.fmean(by_seed))
    assert std == pytest.approx(statistics.stdev(by_seed))


def test_a_folder_of_other_runs_is_refused_by_the_keys_that_differ_and_replaced_if_asked(tmp_path: Path) -> None:
    az.compare(small.config(rounds=1), ["fedavg"], out=tmp_path / "all", jobs=1)
    other = small.config(rounds=1, training={"learning_rate": 0.02})
    with pytest.raises(CheckpointError, match=r"out=.*overwrite=True[^$]*training.learning_rate"):
        az.compare(other, ["fedavg"], out=tmp_path / "all")
    az.compare(other, ["fedavg"], out=tmp_path / "all", overwrite=True, jobs=1)
    assert az.load(tmp_path / "all/fedavg/seed-0").config.training.learning_rate == 0.02
