"""Clients that do not answer: they cost their own update, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import small
from anysize.devices.fleet import Fleet, enrolled, open_fleet
from anysize.engines.base import Absence, Engine
from anysize.engines.inprocess import InProcess
from anysize.errors import AnysizeError
from anysize.methods.messages import SubModel, Ticket, Update
from anysize.records.events import status
from anysize.report import write
from anysize.runs.experiment import Experiment
from anysize.runs.runner import MakeEngine, run
from anysize.server.round import run_round
from anysize.wire import Json, Tensors, dump, flatten

Silent = Callable[[Json], bool]


class Flaky(Engine):
    """The clients of the reference engine, but those that `silent` names by their ticket do not answer."""

    def __init__(self, experiment: Experiment, kept: Mapping[int, Tensors], silent: Silent) -> None:
        self._engine = InProcess(experiment.context, experiment.method, experiment.shares, kept)
        self._silent = silent

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
        for sub_model in sub_models:
            if self._silent(sub_model.ticket):
                yield Absence(sub_model.ticket.client, "too late")
            else:
                yield from self._engine.perform([sub_model])


def flaky(silent: Silent) -> MakeEngine:
    return lambda experiment, kept: Flaky(experiment, kept, silent)


def bits(state: Any) -> bytes:
    return dump(*flatten(state))


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "flanc", "splitmix"])
def test_a_round_without_a_client_is_the_round_that_never_asked_it(method: str) -> None:
    made = small.experiment(method={"name": method})
    state = made.method.init(made.context)
    clients = [c for c in _clients(made) if c.id != 2]
    without, _ = run_round(made.context, made.method, state, clients, _inside(made), 0.05)
    engine = Flaky(made, {}, lambda ticket: ticket.client == 2)
    found, tally = run_round(made.context, made.method, state, _clients(made), engine, 0.05)
    assert bits(found) == bits(without)
    assert tally.missing == [{"client": 2, "why": "too late"}]
    assert 2 not in {client["client"] for client in tally.clients}


def test_too_few_answers_leave_the_state_untouched() -> None:
    made = small.experiment()
    state = made.method.init(made.context)
    before = bits(state)
    engine = Flaky(made, {}, lambda ticket: ticket.client > 1)
    found, tally = run_round(made.context, made.method, state, _clients(made), engine, 0.05, least=3)
    assert tally.void
    assert bits(found) == before
    found, tally = run_round(made.context, made.method, state, _clients(made), engine, 0.05, least=2)
    assert not tally.void
    assert bits(found) != before


def test_nobody_answering_leaves_the_state_untouched() -> None:
    made = small.experiment()
    state = made.method.init(made.context)
    found, tally = run_round(made.context, made.method, state, _clients(made), Flaky(made, {}, lambda _: True), 0.05)
    assert tally.void
    assert found is state
    assert len(tally.missing) == 6
    assert tally.train_loss is None


def test_the_run_says_who_was_missing_and_goes_on(tmp_path: Path) -> None:
    made = small.experiment(engine={"name": "inprocess", "min_clients": 4})

    def silent(ticket: Ticket) -> bool:
        return ticket.job == "train" and ((ticket.round == 2 and ticket.client > 2) or ticket.client == 0)

    finished = run(made, out=tmp_path / "run", engine=flaky(silent))
    first, second, third = finished.history
    assert [entry["client"] for entry in first["missing"]] == [0]
    assert "void" not in first
    assert "void" not in third
    assert second["void"] is True
    assert {entry["client"] for entry in second["missing"]} == {0, 3, 4, 5}
    assert all(entry["why"] == "too late" and entry["task"] == "train" for entry in second["missing"])
    assert second["accuracy"] == first["accuracy"]
    found = status(tmp_path / "run")
    assert found["missing"] == 6
    assert found["void"] == [2]
    assert found["last_missing"]["round"] == 3


def test_momentum_of_the_server_does_not_move_a_round_without_answers(tmp_path: Path) -> None:
    made = small.experiment(rounds=2, tricks={"server_momentum": 0.9})
    engine = flaky(lambda ticket: ticket.job == "train" and ticket.round == 2)
    one = run(small.experiment(rounds=1, tricks={"server_momentum": 0.9}), out=tmp_path / "one", engine=engine)
    two = run(made, out=tmp_path / "two", engine=engine)
    assert bits(one.state) == bits(two.state)


def test_a_run_that_nobody_answers_stops_and_can_go_on(tmp_path: Path) -> None:
    calm = {"evaluate_every": 100, "training": {"learning_rate": 0.01}}
    made = small.experiment(rounds=7, checkpoint_every=5, engine={"void_rounds": 2}, **calm)
    with pytest.raises(AnysizeError, match=r"after round 4: 2 rounds in a row .* client 0: too late.*resume=True"):
        run(made, out=tmp_path / "run", engine=flaky(lambda ticket: ticket.round > 2))
    again = run(made, out=tmp_path / "run", engine=flaky(lambda ticket: False), resume=True)
    assert [event["round"] for event in again.history] == list(range(1, 8))
    silent = flaky(lambda ticket: ticket.round in (3, 4))
    unbroken = run(small.experiment(rounds=7, **calm), out=tmp_path / "whole", engine=silent)
    assert bits(again.state) == bits(unbroken.state)


def test_evaluation_and_calibration_take_those_who_answer(tmp_path: Path) -> None:
    def made() -> Experiment:
        return Experiment(
            data="digits",
            clients=6,
            partition={"fraction": 0.2, "validation": 0.2},
            model=small.normalised_network(),
            method="heterofl",
            devices={"capacities": [0.5, 1.0], "assignment": "order"},
            tricks={"batch_norm": "calibrated"},
            evaluation={"on": ["clients"]},
            rounds=1,
        )

    finished = run(made(), out=tmp_path / "run", engine=flaky(lambda t: t.job != "train" and t.client in (0, 5)))
    (event,) = finished.history
    assert {entry["client"] for entry in event["missing"]} == {0, 5}
    assert {entry["task"] for entry in event["missing"]} == {"evaluate"}
    assert sum(group["clients"] for group in event["client_metrics"].values()) == 4
    assert set(finished._checkpoint.statistics) == {"0.5", "1.0"}
    nobody = run(made(), out=tmp_path / "nobody", engine=flaky(lambda t: t.job != "train"))
    assert nobody._checkpoint.statistics == {}
    assert nobody.history[0]["client_metrics"] == {}


def test_a_method_that_asks_devices_says_so_if_none_answers(tmp_path: Path) -> None:
    made = small.experiment(rounds=1, method={"name": "splitmix", "sort_bases": True})
    with pytest.raises(AnysizeError, match="none answered; go on with resume=True"):
        run(made, out=tmp_path / "run", engine=flaky(lambda ticket: ticket.job == "evaluate"))


def test_real_devices_take_part_as_they_come(tmp_path: Path) -> None:
    """Whoever is there is drawn from; who is not there yet is asked nothing."""

    class Growing(Flaky):
        def fleet(self, round: int, planned: Fleet) -> Fleet:
            groups = {client: "1.0" if client % 2 else "0.5" for client in range(2 + round)}
            return enrolled(planned, made.config.devices, groups, [c for c in groups if (c, round) != (0, 2)])

    made = small.experiment(evaluation={"on": ["clients"]})
    finished = run(
        made, out=tmp_path / "run", engine=lambda experiment, kept: Growing(experiment, kept, lambda _: False)
    )
    took_part = [sorted(client["client"] for client in event["clients"]) for event in finished.history]
    assert took_part == [[0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4]]
    sizes = {client["client"]: client["size"] for event in finished.history for client in event["clients"]}
    assert sizes == {0: "0.5", 1: "1.0", 2: "0.5", 3: "1.0", 4: "0.5"}
    judged = [sum(group["clients"] for group in event["client_metrics"].values()) for event in finished.history]
    assert judged == [3, 3, 5]


def test_who_takes_part_does_not_depend_on_who_was_once_there() -> None:
    """A server that restarts knows only the devices that have come back."""
    config = small.config(devices={"capacities": [0.5, 1.0], "clients_per_round": 2}).devices
    planned = open_fleet(config, seed=3)
    groups = dict.fromkeys(range(6), "0.5")
    before = enrolled(planned, config, groups, present=[0, 1, 2, 4])
    after = enrolled(planned, config, dict.fromkeys((0, 1, 2, 4), "0.5"), present=[0, 1, 2, 4])
    drawn = [before.participants(round) for round in range(1, 30)]
    assert drawn == [after.participants(round) for round in range(1, 30)]
    assert {client for pair in drawn for client in pair} == {0, 1, 2, 4}
    assert all(len(pair) == 2 for pair in drawn)
    with pytest.raises(IndexError, match="has not joined yet"):
        after.group_of(3, round=1)


def test_the_report_lists_who_was_missing(tmp_path: Path) -> None:
    made = small.experiment(engine={"min_clients": 6})
    silent = flaky(lambda ticket: ticket.job == "train" and ticket.client == 3 and ticket.round != 1)
    run(made, out=tmp_path / "run", engine=silent)
    page = write(tmp_path / "run").read_text()
    assert "too late" in page
    lines = (tmp_path / "run" / "report" / "missing.csv").read_text().splitlines()
    assert lines[0].startswith("round,")
    assert len(lines) == 3
    assert lines[1].startswith("2,3,")


def _clients(made: Experiment) -> list[Any]:
    from anysize.methods.messages import Client

    return [
        Client(c, c, made.size_of_group[made.fleet.group_of(c, 1).name], 1, made.shares.samples(c), 0) for c in range(6)
    ]


def _inside(made: Experiment) -> InProcess:
    return InProcess(made.context, made.method, made.shares, {})
