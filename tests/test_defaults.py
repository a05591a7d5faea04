"""A run's config.toml holds every default, so that a later default cannot change what the run means."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import anysize as az
import small
from anysize import config as configs
from anysize import methods, models
from anysize.config import table as config_table
from anysize.config import toml as config_toml
from anysize.config.table import Table
from anysize.config.tables import ExperimentConfig
from anysize.data import sources
from anysize.devices.budget import Budget
from anysize.errors import CheckpointError
from anysize.methods import FLANC, HeteroFL
from anysize.methods.training import Tricks
from anysize.models import registry
from anysize.models.dense import mlp
from anysize.runs.experiment import Experiment
from anysize.runs.resuming import resumed

NAMES = [name for name, _ in methods.methods()]
CNN = {"name": "small-cnn", "options": {"channels": [4, 8]}}
BLOCKS = {"name": "elf-cnn", "options": {"blocks": 2}}

OLD = Path(__file__).parent / "fixtures" / "run-with-a-short-config"
"""A finished round of a run whose config.toml has neither the method's options nor its tricks."""

OLD_FILE = """
name = "before"
rounds = 1
data = { name = "digits", clients = 4, split = "classes", classes_per_client = 3, fraction = 0.1, validation = 0.2 }
model = { name = "mlp", options = { hidden = [6, 4] } }
method = { name = "heterofl" }
devices = { capacities = [0.5, 1.0] }
training = { learning_rate = 0.05, batch_size = 8 }
evaluation = { on = ["test", "clients"] }
"""
"""The file that it was begun with."""

SECOND_ROUND = {"train loss": 2.369664708773295, "0.5": 2.3623783037190984, "1.0": 2.34793966394281}
"""Losses of its second round, as measured when its config.toml was the newest kind."""


def written(directory: Path) -> dict[str, Any]:
    """The tables of a run's config.toml."""
    return tomllib.loads((directory / "config.toml").read_text())


def content(directory: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for its times and its surroundings."""
    lines = (directory / "events.jsonl").read_text().splitlines()
    events = [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]
    names = ["config.toml", "clients.csv", "state.safetensors"]
    return {name: (directory / name).read_bytes() for name in names} | {"events": events}


def short(**changes: Any) -> Experiment:
    """An experiment that leaves as much as it can to defaults; with another model it is less quick."""
    tables: dict[str, Any] = {
        "name": "short",
        "rounds": 2,
        "data": {"name": "digits", "clients": 4, "fraction": 0.1, "validation": 0.2},
        "model": {"name": "mlp", "options": {"hidden": [8, 4]}},
        "devices": {"capacities": [0.5, 1.0]},
        "method": {"name": "flanc"},
    }
    return Experiment.from_config(configs.from_dict(tables | changes))


def fitting(name: str) -> dict[str, Any]:
    """A short experiment's tables that a method can train."""
    return {"method": {"name": name}, "model": BLOCKS if name == "elf" else CNN}


# What is written ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_complete_config_of_every_method_is_a_fixed_point(name: str) -> None:
    experiment = short(**fitting(name))
    text = configs.dumps(experiment.complete)
    again = Experiment.from_config(configs.loads(text))
    assert configs.dumps(again.config) == configs.dumps(again.complete) == text
    assert (again.method, again.tricks) == (experiment.method, experiment.tricks)
    tables = tomllib.loads(text)
    assert set(tables["method"]) == {"name", *inspect.signature(type(experiment.method)).parameters}
    assert tables["tricks"] == dataclasses.asdict(type(experiment.method).paper)


@pytest.mark.parametrize("name", small.fast_if({"flanc", "prism", "splitmix"}.__contains__, NAMES))
def test_the_written_config_runs_the_same_experiment_bit_for_bit(name: str, tmp_path: Path) -> None:
    run = short(**fitting(name)).run(tmp_path / "run")
    again = az.run(run.directory / "config.toml", out=tmp_path / "again")
    assert content(again.directory) == content(run.directory)
    assert again.config == run.config == again.experiment.config


def test_options_of_networks_and_data_sets_are_written_too(tmp_path: Path) -> None:
    run = short(model={"name": "mlp"}, rounds=1).run(tmp_path / "run")
    assert written(run.directory)["model"]["options"] == {"hidden": [256, 128]}
    domains = short(data={"name": "digits-domains", "clients": 4}).complete.data.options
    assert domains == {"domains": ["mnist", "usps", "mnist-m"], "size": 28}
    assert short(
        data={"name": "shakespeare", "clients": 4, "options": {"sequence_length": 20}}
    ).complete.data.options == {
        "sequence_length": 20,
        "minimum_samples": 1,
        "test_fraction": 0.2,
    }


def keys(table: type[Table]) -> dict[str, Any]:
    """The dotted keys of a table and of those below it, with their defaults."""
    found: dict[str, Any] = {}
    for name, field in table.model_fields.items():
        inner = next(config_table.tables_in(field.annotation), None)
        key = f"{table.table}.{name}".lstrip(".")
        found |= {key: field.get_default()} if inner is None or field.default is None else keys(inner)
    return found


def test_what_a_complete_file_leaves_out_is_what_means_nothing_set() -> None:
    """None cannot be written: a key that once had it as its default must mean "not set" wherever it is absent."""
    absent = {key for key, default in keys(ExperimentConfig).items() if default is None}
    assert {key for key in absent if not key.startswith("tricks.")} == {
        *(f"data.{key}" for key in ("test", "clients", "classes_per_client", "unbalance", "alpha", "normalize")),
        "data.groups_per_client",
        *(f"model.{key}" for key in ("weights", "input", "tokens")),
        *(f"devices.{key}" for key in ("capacities", "fractions", "participation", "clients_per_round", "file")),
        *(f"devices.{key}" for key in ("distribution", "distribution_options", "macs_per_second")),
        *(f"devices.bytes_per_second{which}" for which in ("", "_up", "_down")),
        *(
            f"devices.groups.{key}"
            for key in ("clients", "fraction", "capacity", "budget", "depth", "sparsity", "available")
        ),
        *(f"devices.groups.{key}_per_second" for key in ("macs", "bytes")),
        *(f"devices.groups.bytes_per_second_{which}" for which in ("up", "down")),
        *(f"training.{key}" for key in ("local_epochs", "local_steps", "clip")),
        *("task.classes", "task.target", "evaluation.clients", "evaluation.calibration_proxy", "compare"),
        *(f"devices.budgets.{key}" for key in ("group", "client", *(unit.name for unit in dataclasses.fields(Budget)))),
        *("devices.groups.latencies", "adversary.strength", "aggregation.norm"),
        *("privacy.clip", "privacy.quantile", "privacy.count_noise"),
        "aggregation.secure_threshold",
        *(f"engine.{key}" for key in ("workers", "round_timeout", "min_clients")),
    }
    known = {"data": sources._SOURCES, "model": registry._MODELS}
    options = {
        f"{name}.{parameter.name}"
        for functions in known.values()
        for name, function in functions.items()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is None
    }
    own = {f"digits-domains.{key}" for key in ("per_domain", "test_per_domain")}
    assert options == own | {"fashion-mnist.size"}
    for name, function in registry._MODELS.items():
        assert {*models.defaults(name), "input_shape", "classes"} == set(inspect.signature(function).parameters)
    for name in NAMES:
        assert set(methods.defaults(name)) == {field.name for field in dataclasses.fields(type(methods.make(name)))}


# Directories from before --------------------------------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the old directory, with its file beside it."""
    (tmp_path / "before.toml").write_text(OLD_FILE)
    return shutil.copytree(OLD, tmp_path / "old")


def test_an_old_directory_loads_and_evaluates_as_it_did(old: Path) -> None:
    assert "masked_loss" not in (old / "config.toml").read_text()
    run = az.load(old)
    assert run.experiment.tricks == HeteroFL.paper
    before = run.history[-1]["metrics"]
    for size, metrics in run.evaluate().items():
        assert metrics == pytest.approx(before[size], rel=1e-5)


@pytest.mark.parametrize("file", ["before.toml", "old/config.toml"])
def test_an_old_directory_is_resumed_to_what_it_would_have_been(old: Path, file: str) -> None:
    events: list[Any] = []
    run = az.run(old.parent / file, out=old, overrides=["rounds=2"], resume=True, on_event=events.append)
    last = run.history[-1]
    losses = {size: metrics["loss"] for size, metrics in last["metrics"].items()}
    assert {"train loss": last["train_loss"], **losses} == pytest.approx(SECOND_ROUND, rel=1e-5)
    assert not [event for event in events if event["event"] == "notice"]
    assert written(old)["method"] == {"name": "heterofl", "scaler": True, "ordered_dropout": False, "share": "all"}
    assert written(old)["tricks"]["weighting"] == "clients"


def test_an_old_run_of_a_comparison_is_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "before.toml"
    file.write_text(OLD_FILE)
    shutil.copytree(OLD, tmp_path / "all/heterofl/seed-0")
    config = tmp_path / "all/heterofl/seed-0/config.toml"
    config.write_text(config.read_text().replace('"before"', '"heterofl-seed-0"'))
    before = content(tmp_path / "all/heterofl/seed-0")
    events: list[Any] = []
    az.compare(file, ["heterofl"], out=tmp_path / "all", on_event=lambda name, event: events.append(event))
    assert [event["event"] for event in events] == ["finished before"]
    assert content(tmp_path / "all/heterofl/seed-0") == before


# Later defaults -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Later(FLANC):
    """A later version's FLANC, with other defaults and other tricks."""

    orthogonality: float = 0.5
    start: Any = "nested"

    paper = Tricks(weighting="clients", proximal=0.1)


def wide_mlp(
    input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (12, 6), extra: bool = False
) -> nn.Module:
    """A later version's mlp, with another default and one option more."""
    return mlp(input_shape, classes, hidden)


def narrow_mlp(input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (8, 4)) -> nn.Module:
    """An mlp with small defaults."""
    return mlp(input_shape, classes, hidden)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file, a run of it for one round and one of two, after which defaults changed."""
    monkeypatch.setitem(registry._MODELS, "mlp", narrow_mlp)
    (tmp_path / "short.toml").write_text(
        'model.name = "mlp"\nmethod.name = "flanc"\n'
        'data = { name = "digits", clients = 4, fraction = 0.1 }\ndevices.capacities = [0.5, 1.0]\n'
    )
    for rounds, name in ((1, "run"), (2, "whole")):
        az.run(tmp_path / "short.toml", out=tmp_path / name, overrides=[f"rounds={rounds}"])
    monkeypatch.setitem(methods._METHODS, "flanc", Later)
    monkeypatch.setitem(registry._MODELS, "mlp", wide_mlp)
    return tmp_path


def test_a_later_default_changes_no_run_that_is_loaded(ended: Path) -> None:
    run = az.load(ended / "whole")
    assert isinstance(run.experiment.method, Later)
    assert (run.experiment.method.orthogonality, run.experiment.method.start) == (10.0, "apart")
    assert run.experiment.tricks == FLANC.paper
    assert run.evaluate() == run.history[-1]["metrics"]


def test_a_later_default_changes_no_run_that_is_resumed(ended: Path) -> None:
    events: list[Any] = []
    run = az.run(ended / "short.toml", out=ended / "run", overrides=["rounds=2"], resume=True, on_event=events.append)
    assert content(ended / "run")["state.safetensors"] == content(ended / "whole")["state.safetensors"]
    whole = written(ended / "whole")
    whole["model"]["options"]["extra"] = False  # an option that there was not
    assert written(ended / "run") == whole
    assert run.experiment.method == Later(orthogonality=10.0, start="apart")
    (notice,) = [event["text"] for event in events if event["event"] == "notice"]
    for line in ("method.orthogonality: 10.0, not 0.5", 'tricks.weighting: "samples", not "clients"'):
        assert line in notice
    assert "rounds" not in notice


def test_a_run_begun_later_has_the_later_defaults(ended: Path) -> None:
    run = az.run(ended / "short.toml", out=ended / "new", overrides=["rounds=1"])
    assert run.experiment.method == Later()
    assert written(run.directory)["method"]["orthogonality"] == 0.5
    assert written(run.directory)["model"]["options"] == {"hidden": [12, 6], "extra": False}


def test_a_comparison_refuses_runs_of_other_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small.config(rounds=1)
    az.compare(config, ["flanc"], out=tmp_path / "all", jobs=1)
    monkeypatch.setitem(methods._METHODS, "flanc", Later)
    with pytest.raises(CheckpointError, match=r"method\.orthogonality: 10\.0 -> 0\.5"):
        az.compare(config, ["flanc"], out=tmp_path / "all", jobs=1)


# What a resumed run goes on with ------------------------------------------------------------------


def test_what_a_resumed_file_leaves_out_stays_as_the_run_was_begun(tmp_path: Path) -> None:
    events: list[Any] = []
    training = {"local_steps": 2, "clip": 1.0}
    short(training=training, evaluation={"batch_size": 7}, rounds=1).run(tmp_path / "run")
    run = short(rounds=2).run(tmp_path / "run", resume=True, on_event=events.append)
    whole = short(training=training, evaluation={"batch_size": 7}, rounds=2).run(tmp_path / "whole")
    assert content(run.directory)["state.safetensors"] == content(whole.directory)["state.safetensors"]
    assert written(run.directory) == written(whole.directory)
    (notice,) = [event["text"] for event in events if event["event"] == "notice"]
    assert "training.local_steps: 2, not absent" in notice
    assert "evaluation.batch_size: 7, not 500" in notice


def test_only_what_the_file_says_otherwise_is_listed(tmp_path: Path) -> None:
    short(rounds=1).run(tmp_path / "run")
    with pytest.raises(CheckpointError) as error:
        short(rounds=2, method={"name": "heterofl"}).run(tmp_path / "run", resume=True)
    assert str(error.value).splitlines()[1:] == ["  rounds: 1 -> 2", '  method.name: "flanc" -> "heterofl"']
    with pytest.raises(CheckpointError) as error:
        short(rounds=1, training={"local_steps": 3}, tricks={"proximal": 0.1}).run(tmp_path / "run", resume=True)
    assert str(error.value).splitlines()[1:] == ["  tricks.proximal: 0.0 -> 0.1", "  training.local_steps: absent -> 3"]


def test_another_file_of_groups_is_refused(tmp_path: Path) -> None:
    experiment = tmp_path / "short.toml"
    experiment.write_text(
        'rounds = 1\nmodel = { name = "mlp", options.hidden = [8, 4] }\nmethod.name = "heterofl"\n'
        'data = { name = "digits", clients = 4, fraction = 0.1 }\ndevices.file = "groups.csv"\n'
    )
    (tmp_path / "groups.csv").write_text("name,capacity\nsmall,0.5\nlarge,1.0\n")
    az.run(experiment, out=tmp_path / "run")
    az.run(experiment, out=tmp_path / "run", resume=True)
    (tmp_path / "groups.csv").write_text("name,capacity\nsmall,0.25\nlarge,1.0\n")
    with pytest.raises(CheckpointError, match=r"devices\.groups\[0\]\.capacity: 0\.5 -> 0\.25"):
        az.run(experiment, out=tmp_path / "run", resume=True)


def test_a_resumed_run_takes_the_engine_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = short(engine={"name": "inprocess", "workers": 1, "update_norm": 3.0}).complete
    monkeypatch.setenv("ANYSIZE_ENGINE", "processes")
    experiment, kept = resumed(short(), before, tmp_path)
    assert (experiment.config.engine.name, experiment.config.engine.workers) == ("processes", None)
    assert kept == ["engine.update_norm: 3.0, not 10.0"]


# Code of one's own --------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import anysize as az
from anysize.methods.heterofl import HeteroFL

UNSET = object()


@dataclass(frozen=True)
class Mine(HeteroFL):
    factors: tuple[float, ...] = (0.5, 2.0)
    names: list[str] = field(default_factory=lambda: ["a"])
    limit: float | None = None
    marker: Any = UNSET
    made: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.factors, tuple) and isinstance(self.names, list) and self.marker is UNSET


def network(classes, hidden=(8, 4), slope: float = 0.1, weights=None, *, act=nn.ReLU, nested=((1, 2), (3,))):
    assert hidden + (1,) and nested == ((1, 2), (3,)) and act is nn.ReLU and weights is None
    torch_layers = [nn.Flatten(), nn.Linear(64, hidden[0]), nn.LeakyReLU(slope), nn.Linear(hidden[0], classes)]
    return nn.Sequential(*torch_layers)


def digits(shift: float = 0.25, seed: int | None = None) -> az.Data:
    from anysize.data import load

    found = load("digits")
    x, y = found.train.batch(torch.arange(80))
    return az.Data(train=(x.float() / 255 + shift, y), test=(x.float() / 255, y))


def own_share(device, classes: int = 62, shift: float = 0.5) -> az.Share:
    data = digits(shift)
    return az.Share(train=data.train, held_out=data.test)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code of one's own, which is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine_with_defaults", raising=False)
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine_with_defaults.py").write_text(OWN)
    return folder


def test_defaults_of_ones_own_code_are_written_as_far_as_a_file_can_hold_them(own: Path) -> None:
    names = {"data": "digits", "model": "network", "method": "Mine"}
    tables = {kind: {"name": f"mine_with_defaults:{name}"} for kind, name in names.items()}
    tables["data"] |= {"clients": 4}
    (own / "mine.toml").write_text(config_toml.written({"rounds": 1, **tables}))
    run = az.run(own / "mine.toml", out=own.parent / "elsewhere/run")
    found = written(run.directory)
    assert found["data"]["options"] == {"shift": 0.25}
    assert found["model"]["options"] == {"hidden": [8, 4], "slope": 0.1, "nested": [[1, 2], [3]]}
    assert found["method"] == {
        "name": "mine_with_defaults:Mine",
        "scaler": True,
        "ordered_dropout": False,
        "share": "all",
        "factors": [0.5, 2.0],
        "names": ["a"],
    }
    again = az.run(run.directory / "config.toml", out=own.parent / "again")
    assert content(again.directory) == content(run.directory)
    assert again.experiment.config.folder == own


def test_a_run_whose_file_has_moved_looks_for_code_beside_its_config(own: Path) -> None:
    (own / "mine.toml").write_text(
        'rounds = 1\ndata = { name = "digits", clients = 4 }\nmodel.name = "mine_with_defaults:network"\n'
        'method.name = "fedavg"\n'
    )
    run = az.run(own / "mine.toml", out=own.parent / "run")
    own.rename(own.parent / "moved")
    assert az.load_config(run.directory / "config.toml").folder == run.directory


def test_a_number_of_classes_is_stated_by_the_file_alone(own: Path) -> None:
    data = {"name": "mine_with_defaults:own_share", "clients": 2}
    config = configs.from_dict({"data": data, "model": {"name": "mlp"}, "method": {"name": "fedavg"}}, folder=own)
    experiment = Experiment.from_config(config)
    assert experiment.complete.data.options == {"shift": 0.5}
    assert experiment.signature.classes == experiment.anew(experiment.complete).signature.classes == 10


def test_live_objects_stay_live(tmp_path: Path) -> None:
    from anysize.data import load

    def experiment() -> Experiment:
        made = small.normalised_network()
        return az.Experiment(data=load("digits"), model=made, method=HeteroFL(scaler=False), clients=4, rounds=1)

    run = experiment().run(tmp_path / "run")
    found = written(run.directory)
    assert found["data"]["name"].startswith("live:")
    assert found["model"]["name"].startswith("live:")
    assert found["method"] == {"name": "heterofl", "scaler": False, "ordered_dropout": False, "share": "all"}
    assert found["tricks"] == dataclasses.asdict(HeteroFL.paper)
    before = content(run.directory)["state.safetensors"]
    experiment().run(tmp_path / "run", resume=True)
    assert content(run.directory)["state.safetensors"] == before
    loaded = az.load(tmp_path / "run", data=load("digits"), model=small.normalised_network())
    assert loaded.evaluate() == run.evaluate()


# What else knows an experiment by its values ------------------------------------------------------


def test_a_look_up_table_made_for_the_short_file_serves_the_written_one(tmp_path: Path) -> None:
    method = {"name": "elf", "proxy_epochs": 1, "table": str(tmp_path / "elf.table.safetensors")}
    run = short(method=method, model={"name": "elf-cnn"}, rounds=1).run(tmp_path / "run")
    before = Path(method["table"]).stat().st_mtime_ns
    again = az.run(run.directory / "config.toml", out=tmp_path / "again")
    assert content(again.directory) == content(run.directory)
    assert Path(method["table"]).stat().st_mtime_ns == before


def test_workers_are_told_every_value(tmp_path: Path) -> None:
    from anysize.engines.workers.engine import described

    experiment = short()
    assert described(experiment, tmp_path)["brief"]["config"] == configs.dumps(experiment.complete)


def test_a_trick_that_nobody_could_follow_is_not_written() -> None:
    tables = {
        "data": {"name": "devices"},
        "model": {"name": "mlp", "input": [3]},
        "method": {"name": "heterofl"},
        "task": {"name": "regression", "target": [1]},
    }
    experiment = Experiment.from_config(configs.from_dict(tables))
    text = configs.dumps(experiment.complete)
    assert Experiment.from_config(configs.loads(text)).tricks == experiment.tricks
    assert not experiment.tricks.classwise_head
