"""Clients train on the device that the experiment names, and what they send comes back to the processor."""

from __future__ import annotations

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
