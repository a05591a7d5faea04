"""Flower's simulation ends in the bits of one process, refuses what it cannot do, and leaves nothing running."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anysize as az
import small
from anysize.engines.inprocess import InProcess
from anysize.errors import AnysizeError, ConfigError, MethodError
from anysize.methods import methods
from anysize.methods.messages import Client
from anysize.runs.experiment import Experiment
from anysize.server.round import run_round
from anysize.wire import dump, flatten

for extra in ("flwr", "ray"):
    pytest.importorskip(extra, reason="Flower is an extra")
flower = importlib.import_module("anysize.engines.flower")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def experiment(method: str, **changes: Any) -> Experiment:
    model = {"name": "small-cnn", "options": {"channels": [8, 16]}}
    if method == "elf":
        model = {"name": "elf-cnn", "options": {}}
    return small.experiment(method={"name": method}, data={"clients": 12}, model=model, **changes)


def clients(made: Experiment) -> list[Client]:
    size = {c: made.size_of_group[made.fleet.group_of(c, 1).name] for c in range(len(made.shares))}
    return [Client(c, c, size[c], 1, made.shares.samples(c), 0) for c in size]


def bits(state: Any) -> bytes:
    return dump(*flatten(state))


def test_what_is_packed_comes_back_and_foreign_messages_are_refused() -> None:
    tensors = {"a": torch.randn(2, 3), "b": torch.arange(4)}
    note, found, kept = flower.unpacked(flower.packed({"ticket": {"client": 3}}, tensors, {"k": torch.ones(1)}))
    assert note == {"ticket": {"client": 3}}
    assert dump(found, {}) == dump(tensors, {})
    assert kept["k"].tolist() == [1.0]
    with pytest.raises(AnysizeError, match="not one of anysize's"):
        flower.unpacked(flower.RecordDict({}))
    broken = flower.packed({})
    broken["note"]["0000"] = b"rubbish"
    with pytest.raises(AnysizeError, match="damaged"):
        flower.unpacked(broken)


def test_a_failure_on_a_node_is_the_error_that_one_process_raises() -> None:
    told = {"error": "the loss is nan", "kind": "MethodError", "trace": ""}
    with pytest.raises(MethodError, match="the loss is nan"):
        flower.update_in(flower.packed({"failure": told}))


def test_without_the_extra_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "anysize.engines.flower")
    with pytest.raises(ConfigError, match=r"^[^\n]*pip install [^\n]*\[flower\]'$"):
        small.experiment(engine={"name": "flower"}).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_stacks_are_refused_on_flower_and_the_engines_that_can_are_named(tmp_path: Path) -> None:
    made = small.experiment(engine={"name": "flower"}, training={"stack": 2})
    with pytest.raises(ConfigError, match="inprocess and processes stack clients"):
        made.run(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name, _ in methods() if name != "lora"])  # test_lora has workers for it
def test_every_method_ends_in_the_same_bits_and_nothing_is_left_running(method: str) -> None:
    tricks = {"heterofl": {"batch_norm": "local"}, "flanc": {"classwise_head": True}}
    made = experiment(method, tricks=tricks.get(method, {}))
    kept_here: dict[int, Any] = {}
    kept_there: dict[int, Any] = {}
    here = there = made.method.init(made.context)
    inside = InProcess(made.context, made.method, made.shares, kept_here)
    with flower.Flower(made, kept_there, workers=2) as engine:
        for _ in range(2):
            here, tally = run_round(made.context, made.method, here, clients(made), inside, 0.05)
            kept_here |= tally.kept
            there, tally = run_round(made.context, made.method, there, clients(made), engine, 0.05)
            kept_there |= tally.kept
    assert bits(here) == bits(there)
    assert kept_here.keys() == kept_there.keys()
    assert bool(kept_here) == (method == "heterofl")
    assert all(dump(kept_here[c], {}) == dump(kept_there[c], {}) for c in kept_here)
    assert engine._simulation._thread.is_alive() is False
    assert not engine._home.path.exists()


@pytest.mark.slow
def test_an_experiment_file_runs_on_flower_and_gives_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = small.file(tmp_path, rounds=2, evaluation={"on": ["test", "clients"]})
    for engine in ("inprocess", "flower"):
        code, _, err = small.call(
            monkeypatch,
            capsys,
            "run",
            file,
            "--out",
            tmp_path / engine,
            "--engine",
            engine,
            "--set",
            "engine.workers=2",
        )
        assert code == 0, err
    here, there = ((tmp_path / engine / "state.safetensors").read_bytes() for engine in ("inprocess", "flower"))
    assert here == there
    rows = [(tmp_path / engine / "clients.csv").read_text() for engine in ("inprocess", "flower")]
    assert rows[0] == rows[1]
    assert az.load(tmp_path / "flower").config.engine.name == "flower"


@pytest.mark.slow
def test_an_error_on_a_node_ends_the_round_as_in_one_process() -> None:
    made = experiment("heterofl", training={"learning_rate": 1e30})
    state = made.method.init(made.context)
    with flower.Flower(made, {}, workers=1) as engine, pytest.raises(MethodError, match="diverged"):
        run_round(made.context, made.method, state, clients(made), engine, 1e30)
