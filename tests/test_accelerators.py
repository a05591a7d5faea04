"""Clients train on the device that the experiment names, and what they send comes back to the processor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small
from anysize.client import accelerators
from anysize.client.accelerators import device, place
from anysize.client.work import perform
from anysize.engines.workers import engine as engines
from anysize.engines.workers.engine import Processes
from anysize.errors import ConfigError
from anysize.methods import FLANC, FedAvg
from anysize.methods.base import Method
from anysize.methods.messages import Client
from anysize.methods.training import Batch, Step
from anysize.server.judging import on_test
from anysize.testing import Trial, make_trial

FIRST = torch.device("cpu", 0)  # the processor under another name, so that moves to it can be seen
MOVED: list[Tensor] = []


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes every tensor that is moved to the device."""
    plain = torch.Tensor.to

    def to(self: Tensor, *where: Any, **options: Any) -> Tensor:
        made = plain(self, *where, **options)
        if where[:1] == (FIRST,):
            MOVED.append(made := made.clone(memory_format=torch.preserve_format))
        return made

    MOVED.clear()
    monkeypatch.setattr(torch.Tensor, "to", to)


def is_there(tensors: Iterable[Tensor]) -> bool:
    """Whether all of them live in memory that was moved to the device."""
    places = {tensor.untyped_storage().data_ptr() for tensor in MOVED}
    return all(tensor.untyped_storage().data_ptr() in places for tensor in tensors)


@dataclass(frozen=True)
class Seen(FedAvg):
    """Notes where the tensors of a step are."""

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        named = [*module.parameters(), *step.received.values(), batch.x, batch.y]
        PLACES.append(is_there(named))
        return super().loss(module, batch, step)


PLACES: list[bool] = []


def trained(trial: Trial, task: str = "train") -> dict[str, Tensor]:
    client = Client(0, 0, trial.context.largest, 1, 12, 0)
    message = trial.method.extract(trial.context, trial.state, client)
    message = replace(message, ticket=replace(message.ticket, job=task, rate=0.05))
    return perform(trial.context, trial.method, message, trial.experiment.shares.share(0)).tensors


def moved(method: Method, where: torch.device, **options: object) -> Trial:
    trial = make_trial(method, None, (1.0,), None)
    tricks = replace(trial.context.tricks, **options)  # type: ignore[arg-type]
    return replace(trial, context=replace(trial.context, device=where, tricks=tricks, built={}))


@pytest.mark.parametrize("tricks", [{}, {"proximal": 0.1, "masked_loss": True}])
def test_a_step_has_everything_on_the_device_and_its_update_comes_back(tricks: dict[str, object]) -> None:
    PLACES.clear()
    plain = trained(moved(Seen(), torch.device("cpu"), **tricks))
    assert not any(PLACES)
    PLACES.clear()
    found = trained(moved(Seen(), FIRST, **tricks))
    assert PLACES
    assert all(PLACES)
    for name, tensor in found.items():
        assert tensor.device == torch.device("cpu")
        assert torch.equal(tensor, plain[name])


def test_placeholders_stay_where_they_are() -> None:
    trial = moved(FLANC(), FIRST)
    assert trained(trial).keys() == trained(moved(FLANC(), torch.device("cpu"))).keys()
    module = nn.Linear(2, 2)
    module.register_buffer("later", torch.empty(3, device="meta"), persistent=False)
    assert place(module, FIRST).later.is_meta
    assert is_there(module.parameters())


def test_networks_are_tested_on_the_device() -> None:
    trial = moved(FedAvg(), FIRST)
    data = trial.experiment.data
    assert data is not None
    part = data.train
    found = on_test(trial.context, trial.method, trial.state, part, {}, 50)
    assert found == on_test(replace(trial.context, device=torch.device("cpu")), trial.method, trial.state, part, {}, 50)


def test_a_device_that_is_not_there_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"'cuda'.*there is: cpu.*engine.accelerator = \"auto\""):
        device("cuda")
    assert device("cuda", or_cpu=True) == device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="cuda"):
        small.experiment(engine={"name": "inprocess", "accelerator": "cuda"}).context  # noqa: B018


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators.torch.cuda, "is_available", lambda: True)
    assert device("auto") == torch.device("cuda")
    assert torch.backends.cudnn.deterministic
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets a device read pinned memory as a GPU does; pinning is noted, and memory is pinned when it is copied."""
    noted: list[str] = []

    def pin(tensor: Tensor) -> Tensor:
        noted.append("pinned")
        return tensor.clone(memory_format=torch.preserve_format)

    monkeypatch.setattr(accelerators, "_by_itself", lambda where: where == FIRST)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: noted.append("waited"))
    return noted


@pytest.mark.parametrize("method", [FedAvg(), FLANC()])
def test_what_a_gpu_fetches_and_writes_by_itself_ends_in_the_same_bits(method: Method, as_gpu: list[str]) -> None:
    plain = trained(moved(method, torch.device("cpu"), proximal=0.1))
    assert not as_gpu
    found = trained(moved(method, FIRST, proximal=0.1))
    assert as_gpu.count("waited") == 1
    # The batches' inputs and targets, what arrived for the proximal term if the names match, and what leaves.
    assert as_gpu.count("pinned") >= 2 + len(found)
    assert as_gpu[-1] == "waited"
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_an_update_that_came_back_is_not_the_networks_own_memory(as_gpu: list[str]) -> None:
    own = {"w": torch.ones(3)}
    for where in (FIRST, torch.device("cpu")):
        back = accelerators.brought(own, where)
        own["w"] += 1
        assert back["w"].tolist() == [float(own["w"][0]) - 1] * 3


def test_workers_take_the_gpus_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    accelerators.share_gpus(0)
    assert not chosen  # there is none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for worker in range(5):
        accelerators.share_gpus(worker)
    assert chosen == [0, 1, 0, 1, 0]


def test_every_worker_is_told_its_own_number() -> None:
    sent: list[int] = []

    class Connection:
        def send_bytes(self, message: bytes) -> None:
            sent.append(json.loads(message)["worker"])

    class Pool:
        def arrived(self) -> tuple[None, Connection]:
            return None, Connection()

    engine = Processes.__new__(Processes)
    engine._pool, engine._hello, engine._greeted = Pool(), {}, 0  # type: ignore[assignment]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engines, "_ready", lambda connections: connections)
        patched.setattr(Connection, "recv_bytes", lambda self: b"{}", raising=False)
        engine._briefed(2)
        engine._briefed(1)
    assert sent == [0, 1, 2]
