"""Devices that sit out because no size fits their budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import small
from anysize.config.devices import DevicesConfig
from anysize.errors import ConfigError
from anysize.experiment.plan import plan
from anysize.report import write
from anysize.report.record import read
from anysize.runs.experiment import Experiment
from anysize.runs.runner import run
from test_elf import DENSE, ELF, made

TINY = {"name": "tiny", "clients": 2, "budget": {"parameters": 50}}  # 64 inputs alone need more
BOARD = {"name": "board", "clients": 2, "budget": {"parameters": 700}}
HUB = {"name": "hub", "clients": 2, "budget": {"parameters": 10_000}}


def groups(*kinds: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"capacities": None, "groups": list(kinds), **more}


def skipping(*kinds: dict[str, Any], **changes: Any) -> Experiment:
    devices = groups(*kinds, **{"infeasible": "skip", "assignment": "order", **changes.pop("devices", {})})
    return small.experiment(
        **{"method": {"name": "heterofl"}, "devices": devices, "rounds": 2, "engine": {"name": "inprocess"}} | changes
    )


def parameters(width: float) -> int:
    """The parameters of the small network at a width, counted by hand: 64 inputs, layers of 16 and 8, ten classes."""
    first, second = max(1, round(16 * width)), max(1, round(8 * width))
    return 64 * first + first + first * second + second + 10 * second + 10


def test_a_group_that_nothing_fits_ends_the_experiment_unless_it_may_sit_out() -> None:
    with pytest.raises(ConfigError, match="group 'tiny' can train no size; the smallest needs parameters = "):
        _ = skipping(TINY, BOARD, HUB, devices={"infeasible": "error"}).sizes
    experiment = skipping(TINY, BOARD, HUB)
    assert [size.label for size in experiment.sizes] == ["board", "hub"]
    assert {experiment.fleet.group_of(client, 1).name for client in (0, 1)} == {"tiny"}
    assert [experiment.fleet.participants(number) for number in (1, 2)] == [[2, 3, 4, 5]] * 2


def test_if_every_group_would_sit_out_it_stays_an_error() -> None:
    with pytest.raises(ConfigError, match=r"(?s)group 'tiny' can train no size.*group 'less' can train no size"):
        _ = skipping({**TINY, "clients": 3}, {**TINY, "clients": 3, "name": "less"}).sizes


def test_those_who_are_drawn_beside_a_group_that_sits_out_stay_drawn() -> None:
    """Oracle: the same fleet with a budget that everybody can afford; who was drawn there and can, is drawn here."""
    some = {"clients_per_round": 3}
    fleet = skipping(TINY, BOARD, HUB, devices=some).fleet
    all_can = skipping({**TINY, "budget": {"parameters": 600}}, BOARD, HUB, devices=some).fleet
    for number in range(1, 20):
        chosen, before = set(fleet.participants(number)), set(all_can.participants(number))
        assert before - {0, 1} <= chosen <= {2, 3, 4, 5}
        assert len(chosen) == 3


def test_with_a_count_for_each_group_the_others_choices_are_the_same() -> None:
    each = {"clients_per_round": [1, 1, 1]}
    fleet = skipping(TINY, BOARD, HUB, devices=each).fleet
    all_can = skipping({**TINY, "budget": {"parameters": 600}}, BOARD, HUB, devices=each).fleet
    for number in range(1, 20):
        assert fleet.participants(number) == [c for c in all_can.participants(number) if c > 1]


def test_a_client_that_draws_a_group_without_a_size_sits_out_that_round() -> None:
    kinds = [{key: value for key, value in kind.items() if key != "clients"} for kind in (TINY, BOARD)]
    fleet = skipping(*kinds, devices={"redraw": "round", "assignment": "random"}).fleet
    for number in range(1, 10):
        able = [client for client in range(6) if fleet.group_of(client, number).name == "board"]
        assert fleet.participants(number) == able
    assert {fleet.group_of(0, number).name for number in range(1, 10)} == {"tiny", "board"}
    with pytest.raises(ConfigError, match=r"devices\.cover: needs infeasible"):
        small.config(devices={"redraw": "round", "cover": True, "infeasible": "skip"})


def test_plan_events_and_report_say_who_sits_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(skipping(TINY, BOARD, HUB))
    by_name = {group["name"]: group for group in found["groups"]}
    assert (by_name["tiny"]["size"], by_name["tiny"]["parameters"]) == (None, None)
    assert by_name["tiny"]["sits_out"].startswith("can train no size; the smallest needs parameters = ")
    assert (by_name["hub"]["sits_out"], by_name["hub"]["parameters"]) == (None, parameters(1.0))
    assert any("'tiny' sits out" in notice for notice in found["notices"])
    devices = groups(TINY, BOARD, HUB, infeasible="skip")
    file = small.file(tmp_path, method={"name": "heterofl"}, devices=devices)
    code, printed, _ = small.call(monkeypatch, capsys, "plan", file)
    assert code == 0
    assert [line.split() for line in printed.splitlines() if line.strip().startswith("tiny")] == [
        ["tiny", "2", "sits", "out"]
    ]

    done = run(skipping(TINY, BOARD, HUB, evaluation={"on": ["test", "clients"]}), out=tmp_path / "run")
    events = [json.loads(line) for line in (done.directory / "events.jsonl").read_text().splitlines()]
    tiny = next(group for group in events[0]["groups"] if group["name"] == "tiny")
    assert tiny["size"] is None
    assert "parameters = " in tiny["sits_out"]
    rounds = [event for event in events if event["event"] == "round"]
    assert [sorted(entry["client"] for entry in event["clients"]) for event in rounds] == [[2, 3, 4, 5]] * 2
    assert all(set(event["client_metrics"]) == {"board", "hub"} for event in rounds)
    record = read(done.directory)
    assert any("'tiny' sits out" in notice for notice in record.start.notices)
    assert "sits out" in write(done.directory).read_text()


def test_a_depth_that_a_method_cannot_train_is_an_error_whoever_may_sit_out() -> None:
    deep = {"name": "deep", "clients": 4, "depth": 9}
    with pytest.raises(ConfigError, match="'deep' has depth = 9, which heterofl cannot train"):
        _ = skipping(TINY, deep).sizes


def test_elf_lets_a_group_sit_out_too() -> None:
    kinds = [{"name": "tiny", "budget": {"macs": 1}}, {"name": "low", "budget": {"macs": 7_500}}]
    experiment = made(ELF(**DENSE), {"groups": kinds, "infeasible": "skip", "assignment": "order"})
    assert [(size.label, size.depth) for size in experiment.sizes] == [("low", 1)]
    assert experiment.fleet.participants(1) == [3, 4, 5]


def test_the_default_is_an_error() -> None:
    assert DevicesConfig().infeasible == "error"
