"""A whole run on devices that have their own data, in one process: messages are bytes, and both doors are shut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import anysize as az
import small
from anysize import config as configs
from anysize.client.work import perform
from anysize.data import Share
from anysize.deploy.device_file import Limits
from anysize.deploy.gate import Gate
from anysize.deploy.guard import Guard
from anysize.deploy.own_data import held_apart
from anysize.devices.fleet import Fleet, enrolled
from anysize.elastic.norm import batch_norms
from anysize.engines.base import Absence, Engine
from anysize.errors import AnysizeError, DataError
from anysize.methods.messages import SubModel, Update
from anysize.records.events import status
from anysize.report import write
from anysize.runs.experiment import Experiment
from anysize.runs.run import load
from anysize.runs.runner import run
from anysize.wire import Json, Tensors, dump, flatten
from anysize.wire import load as read

CAPACITIES = {0: 0.5, 1: 0.5, 2: 1.0, 3: 1.0}


class Loopback(Engine):
    """Four devices, two of each size, behind bytes. `lies` is what a device sends instead of its update."""

    def __init__(self, experiment: Experiment, kept: Mapping[int, Tensors], lies: Any = lambda update: update) -> None:
        self._experiment, self._lies = experiment, lies
        self._guard = Guard.of(experiment)
        self._shares = {client: own_share(client) for client in CAPACITIES}
        self._context = context = experiment.context.for_client()
        self._gates = {
            client: Gate(context, experiment.method, experiment.example, Limits(capacity))
            for client, capacity in CAPACITIES.items()
        }
        self._kept: dict[int, Tensors] = {}

    def fleet(self, round: int, planned: Fleet) -> Fleet:
        groups = {client: str(capacity) for client, capacity in CAPACITIES.items()}
        return enrolled(planned, self._experiment.config.devices, groups, groups)

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
        for sub_model in sub_models:
            down = dump(sub_model.tensors, {}), json.dumps(sub_model.ticket.to_json())
            try:
                blob, note = self._on_device(*down)
            except AnysizeError as error:
                yield Absence(sub_model.ticket.client, str(error))
                continue
            yield self._guard(sub_model, read(blob)[0], json.loads(note))

    def _on_device(self, blob: bytes, text: str) -> tuple[bytes, str]:
        ticket = json.loads(text)
        client = ticket["client"]
        experiment = self._experiment
        taken, share = self._gates[client](blob, ticket), self._shares[client]
        update = perform(self._context, experiment.method, taken, share, self._kept.get(client))
        self._kept[client] = update.keep or self._kept.get(client, {})
        update = self._lies(update)
        return dump(update.tensors, {}), json.dumps(update.to_json())


@cache
def own_share(client: int) -> Share:
    share = small.experiment().shares.share(client)
    return held_apart(Share(share.train), 0.2, f"device {client}")


def config(method: str = "flanc", /, **tables: Any) -> configs.ExperimentConfig:
    return configs.from_dict(
        {
            "rounds": 3,
            "evaluate_every": 1,
            "data": {"name": "devices"},
            "model": {"name": "small-cnn", "input": [1, 8, 8], "options": {"channels": [8, 8]}},
            "task": {"classes": 10},
            "devices": {"capacities": [0.5, 1.0]},
            "method": {"name": method},
            "training": {"learning_rate": 0.02, "batch_size": 16},
            **tables,
        }
    )


def bits(made: az.Run) -> bytes:
    return dump(*flatten(made.state))


@pytest.mark.parametrize("method", ["fedavg", "flanc", "splitmix", "prism", "fjord"])
def test_a_run_on_devices_goes_through_to_the_end(tmp_path: Path, method: str) -> None:
    made = Experiment.from_config(config(method))
    finished = run(made, out=tmp_path / "run", engine=Loopback)
    for event in finished.history:
        assert "missing" not in event
        assert "accuracy" not in event  # the server has nothing to test on
        assert {client["samples"] for client in event["clients"]} == {None}
        assert set(event["client_metrics"]) == {"0.5", "1.0"}
        assert event["train_loss"] > 0
    again = load(tmp_path / "run")
    network = again.customize("0.5")
    assert network(torch.rand(1, 1, 8, 8)).shape == (1, 10)
    with pytest.raises(DataError, match="no test part"):
        again.evaluate()
    assert status(tmp_path / "run")["state"] == "finished"
    assert "devices" in write(tmp_path / "run").read_text()


def test_a_server_with_a_test_set_tests_on_it(tmp_path: Path) -> None:
    made = Experiment.from_config(config(data={"name": "devices", "test": "digits"}, rounds=1))
    finished = run(made, out=tmp_path / "run", engine=Loopback)
    assert set(finished.history[0]["accuracy"]) == {"0.5", "1.0"}
    assert set(load(tmp_path / "run").evaluate()) == {"0.5", "1.0"}


@pytest.mark.parametrize("batch_norm", ["calibrated", "local"])
def test_batch_norm_is_estimated_on_the_devices_or_stays_there(tmp_path: Path, batch_norm: str) -> None:
    made = Experiment.from_config(config("fjord", tricks={"batch_norm": batch_norm}))
    finished = run(made, out=tmp_path / "run", engine=Loopback)
    assert not any("missing" in event for event in finished.history)
    labels = {"0.5", "1.0"} if batch_norm == "calibrated" else set()
    assert set(finished._checkpoint.statistics) == labels
    assert finished._checkpoint.kept == {}  # what stays with a device never comes to the server


def test_a_size_that_no_device_could_calibrate_is_not_customised(tmp_path: Path) -> None:
    class Small(Loopback):
        def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
            for sub_model in sub_models:
                if sub_model.ticket.job == "calibrate" and sub_model.ticket.size == "1.0":
                    yield Absence(sub_model.ticket.client, "too late")
                else:
                    yield from super().perform([sub_model])

    made = Experiment.from_config(config("fjord", tricks={"batch_norm": "calibrated"}))
    finished = run(made, out=tmp_path / "run", engine=Small)
    finished.customize("0.5")
    with pytest.raises(DataError, match=r"size 1\.0 has no batch-norm statistics"):
        finished.customize("1.0")


@pytest.mark.parametrize("channels", ["windows", "drawn"])
def test_weak_devices_alone_ship_the_full_network_that_none_of_them_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: str
) -> None:
    labels: set[str] = set()
    for client in CAPACITIES:
        monkeypatch.setitem(CAPACITIES, client, 0.5)

    class Watched(Loopback):
        def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
            for sub_model in sub_models:
                labels.add(sub_model.ticket.size)
                yield from super().perform([sub_model])

    made = Experiment.from_config(
        config("prism", method={"name": "prism", "channels": channels}, devices={"capacities": [0.5]})
    )
    finished = run(made, out=tmp_path / "run", engine=Watched)
    assert labels == {"0.5"}
    assert set(finished._checkpoint.statistics) == ({"0.5", "1.0"} if channels == "windows" else {"0.5"})
    norms = batch_norms(finished.customize("1.0"))
    assert norms
    assert all((norm.running_mean is not None) == (channels == "windows") for norm in norms)


def test_a_run_that_was_killed_and_resumed_is_the_unbroken_one(tmp_path: Path) -> None:
    class Dying(Loopback):
        def fleet(self, round: int, planned: Fleet) -> Fleet:
            if round == 3:
                raise KeyboardInterrupt
            return super().fleet(round, planned)

    unbroken = run(Experiment.from_config(config()), out=tmp_path / "whole", engine=Loopback)
    with pytest.raises(KeyboardInterrupt):
        run(Experiment.from_config(config()), out=tmp_path / "run", engine=Dying)
    resumed = run(Experiment.from_config(config()), out=tmp_path / "run", engine=Loopback, resume=True)
    assert bits(resumed) == bits(unbroken)
    assert (tmp_path / "run" / "state.safetensors").read_bytes() == (
        tmp_path / "whole" / "state.safetensors"
    ).read_bytes()


def test_a_poisoned_device_costs_its_own_update_alone(tmp_path: Path) -> None:
    def poison(update: Update) -> Update:
        if update.ticket.client != 2 or update.ticket.job != "train":
            return update
        name = max(update.tensors, key=lambda name: update.tensors[name].numel())
        return replace(update, tensors=update.tensors | {name: update.tensors[name] * torch.nan})

    def silent(update: Update) -> Update:
        return replace(update, loss=None) if update.ticket.client == 2 and update.ticket.job == "train" else update

    poisoned = run(Experiment.from_config(config()), out=tmp_path / "a", engine=partial(Loopback, lies=poison))
    without = run(Experiment.from_config(config()), out=tmp_path / "b", engine=partial(Loopback, lies=silent))
    assert bits(poisoned) == bits(without)
    for event in poisoned.history:
        (missing,) = event["missing"]
        assert missing["client"] == 2
        assert "not finite" in missing["why"]


def test_devices_learn_what_the_simulation_learns(tmp_path: Path) -> None:
    """The same devices simulated by a function of their own give the same bits."""

    def simulated(device: int) -> Share:
        return own_share(device)

    tables: Json = {
        "model": {"name": "small-cnn", "options": {"channels": [8, 8]}},
        "training": {"learning_rate": 0.02, "batch_size": 16},
        "tricks": {"weighting": "clients"},
    }
    here = az.Experiment(
        data=simulated,
        clients=4,
        method="fjord",
        devices={"capacities": [0.5, 1.0], "assignment": "order"},
        evaluation={"on": ["clients"]},
        rounds=2,
        task="classification",
        **tables,
    )
    one = run(here, out=tmp_path / "here", engine=None)
    two = run(
        Experiment.from_config(config("fjord", rounds=2, tricks={"weighting": "clients"})),
        out=tmp_path / "there",
        engine=Loopback,
    )
    here_order = [sorted(client["client"] for client in event["clients"]) for event in one.history]
    there_order = [sorted(client["client"] for client in event["clients"]) for event in two.history]
    assert here_order == there_order
    assert bits(one) == bits(two)
