"""Tickets, updates and briefs: what leaves a process comes out of its JSON as it went in, and nothing else comes in."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import small
from anysize.config.files import from_dict, loads
from anysize.engines.base import Engine
from anysize.errors import TrustError
from anysize.experiment.brief import Brief
from anysize.methods.messages import ANSWERS, Client, SubModel, Ticket, Update
from anysize.runs.experiment import Experiment
from anysize.server.round import run_round

NUMBERS = st.integers(min_value=0, max_value=10**9)
TICKETS = st.builds(
    Ticket,
    client=NUMBERS,
    round=NUMBERS,
    seed=NUMBERS,
    size=st.text(max_size=8),
    width=st.floats(min_value=1e-6, max_value=1.0),
    job=st.sampled_from(sorted(ANSWERS)),
    rate=st.floats(min_value=0, max_value=10),
    batch_size=st.none() | st.integers(min_value=1, max_value=1000),
    more=st.dictionaries(st.sampled_from(["keep", "bases", "depth"]), NUMBERS | st.lists(NUMBERS, max_size=3)),
)
TICKET = Ticket(client=3, round=1, seed=0, size="0.5", width=0.5, rate=0.1, more={"keep": 0.5})


def over_the_wire(note: Any) -> Any:
    return json.loads(json.dumps(note))


@given(TICKETS)
def test_a_ticket_comes_out_of_its_json_as_it_went_in(ticket: Ticket) -> None:
    assert Ticket.from_json(over_the_wire(ticket.to_json())) == ticket


@given(TICKETS, NUMBERS, st.floats(allow_nan=False, allow_infinity=False))
def test_an_update_comes_out_of_its_json_with_what_its_job_tells(ticket: Ticket, samples: int, loss: float) -> None:
    told = {"samples": samples, "loss": loss, "classes": [0, 1], "sums": {"count": 2.0}}
    update = Update({"w": torch.ones(2)}, ticket, **told)
    again = Update.from_json(update.tensors, over_the_wire(update.to_json()))
    assert again.ticket == ticket
    for name, value in told.items():
        assert getattr(again, name) == (value if name in ANSWERS[ticket.job] else None)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"client": True}, "client = True"),
        ({"round": -1}, "round = -1"),
        ({"seed": 1.5}, "seed = 1.5"),
        ({"size": 3}, "size = 3 is not a label"),
        ({"width": 0}, "width = 0 "),
        ({"width": math.nan}, "width = nan"),
        ({"width": 10**400}, "width = 1000"),
        ({"job": "delete"}, "job = 'delete' is not one of train"),
        ({"job": {}}, "job = {}"),
        ({"rate": None}, "rate = None"),
        ({"rate": math.inf}, "rate = inf"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"calibration_samples": "all"}, "calibration_samples = 'all'"),
        ({"client": -1, "width": 2}, "client = -1 is not a whole number; width = 2"),
    ],
)
def test_a_wrong_ticket_is_refused_with_every_reason(change: dict[str, Any], said: str) -> None:
    with pytest.raises(TrustError, match=r".") as raised:
        Ticket.from_json(TICKET.to_json() | change)
    assert said in str(raised.value)


@pytest.mark.parametrize("nothing", [None, 3, "ticket", [], {3: 4}])
def test_what_is_no_ticket_is_refused(nothing: Any) -> None:
    with pytest.raises(TrustError, match="is not a ticket"):
        Ticket.from_json(nothing)


@pytest.mark.parametrize("name", ["client", "round", "seed", "size", "width", "job"])
def test_a_ticket_without_a_field_is_refused_by_its_name(name: str) -> None:
    left = {key: value for key, value in TICKET.to_json().items() if key != name}
    with pytest.raises(TrustError, match=f"{name} missing"):
        Ticket.from_json(left)


def test_a_brief_makes_the_same_experiment_without_its_data() -> None:
    experiment = small.experiment(method={"name": "heterofl"})
    told = over_the_wire(Brief.of(experiment).to_json())
    again = Brief.from_json(told, partial(loads, folder=None)).experiment()
    assert again.sizes == experiment.sizes
    assert again.signature == experiment.signature
    assert again.complete == experiment.complete
    assert "source" not in again.__dict__, "the data was loaded"


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": []},
        {"sizes": [{"width": 2.0}]},
        {"sizes": [{"width": "wide"}]},
        {"sizes": [{"length": 1.0}]},
        {"sizes": 3},
        {"signature": {}},
        {"signature": None},
    ],
)
def test_a_brief_of_no_experiment_is_refused(change: dict[str, Any]) -> None:
    told = over_the_wire(Brief.of(small.experiment()).to_json())
    with pytest.raises(TrustError, match=r"describes no experiment|no network can have"):
        Brief.from_json(told | change, partial(loads, folder=None))
    with pytest.raises(TrustError, match="describes no experiment"):
        Brief.from_json({key: told[key] for key in told if key not in change}, partial(loads, folder=None))


def test_the_server_holds_two_messages_at_most_however_many_clients_a_round_has() -> None:
    tables = {"data": {"name": "digits", "clients": 8}, "model": {"name": "mlp"}, "method": {"name": "heterofl"}}
    made = Experiment.from_config(from_dict(tables))
    clients = [Client(place, place, made.sizes[place % 4], 1, 4, 0) for place in range(8)]
    alive, sent = list[int](), list[weakref.ref[Tensor]]()

    class Echoes(Engine):
        def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update]:
            for message in sub_models:
                sent.append(weakref.ref(next(iter(message.tensors.values()))))
                alive.append(sum(one() is not None for one in sent))
                yield Update(message.tensors, message.ticket, samples=4, loss=0.0)

    gc.disable()  # nothing may wait for it
    try:
        run_round(made.context, made.method, made.method.init(made.context), clients, Echoes(), 0.01)
    finally:
        gc.enable()
    assert (len(alive), max(alive), alive[-1]) == (8, 2, 2)
