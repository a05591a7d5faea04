"""Updates in fewer bytes: what is sent, what the server restores, and what stays with the client."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import small
from anysize.client.compression import FEEDBACK, compressed, restored, sent_bytes, sent_forms
from anysize.config.tables import CommunicationConfig
from anysize.deploy.guard import Guard
from anysize.engines.base import Absence
from anysize.engines.service import ClientService
from anysize.errors import ConfigError
from anysize.methods.messages import Client, SubModel, Ticket, Update
from anysize.wire import dump, flatten

TICKET = Ticket(client=0, round=1, seed=0, size="1.0", width=1.0, rate=0.1)
FORMS = ("float16", "int8", "top-k")


def pair(seed: int) -> tuple[SubModel, Update]:
    """A message and the update that answers it: a weight, a small weight, a bias and a count."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"w": (40, 30, 2), "small": (4, 4), "b": (2000,)}
    before = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    after = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=random) for name, tensor in before.items()}
    counts = {"n": torch.tensor(3)}
    return SubModel(before | counts, TICKET), Update(after | counts, TICKET, samples=5, loss=1.0)


def oracle(form: str, change: np.ndarray) -> np.ndarray:
    """What arrives of a change, in plain numpy."""
    if form == "float16":
        return change.astype(np.float16).astype(np.float32)
    if form == "int8":
        factors = np.abs(change).max(axis=(1, 2), keepdims=True) / np.float32(127)
        return np.rint(change / factors).astype(np.float32) * factors
    least = np.sort(np.abs(change).ravel())[-240]  # a tenth of 2,400 entries
    return np.where(np.abs(change) >= least, change, np.float32(0))


@pytest.mark.parametrize("form", FORMS)
def test_the_server_restores_what_numpy_does_and_the_client_keeps_the_rest(form: str) -> None:
    chosen = CommunicationConfig(update=form)
    left = np.zeros((40, 30, 2), np.float32)
    kept: dict[str, Tensor] = {}
    for turn in range(3):
        sub_model, update = pair(turn)
        sent = compressed(chosen, update, sub_model, kept)
        got = restored(chosen, sent, sub_model, update.tensors)
        before, after = sub_model.tensors["w"].numpy(), update.tensors["w"].numpy()
        change = after - before + left
        expected = oracle(form, change)
        np.testing.assert_allclose(got.tensors["w"].numpy(), before + expected, rtol=0, atol=1e-6)
        assert all(torch.equal(got.tensors[name], update.tensors[name]) for name in ("small", "b", "n"))
        if form == "float16":
            assert not sent.keep
            continue
        (own,) = sent.keep.values()
        left, kept = change - expected, sent.keep
        np.testing.assert_allclose(own.numpy(), left, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_counted_as_they_are_on_the_wire(form: str) -> None:
    chosen = CommunicationConfig(update=form)
    sub_model, update = pair(0)
    sent = compressed(chosen, update, sub_model, {})
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in sent.tensors.items()}
    assert forms == {name: (t.shape, t.dtype) for name, t in sent_forms(chosen, update.tensors).items()}
    assert sent_bytes(chosen, update) == len(dump(sent.tensors, update.to_json()))
    weight = sum(t.numel() * t.element_size() for name, t in sent.tensors.items() if name.startswith("w"))
    assert weight == {"float16": 2 * 2400, "int8": 2400 + 4 * 40, "top-k": 8 * 240}[form]


def test_what_was_left_out_is_added_only_to_the_part_that_it_belongs_to() -> None:
    chosen = CommunicationConfig(update="top-k")
    sub_model, update = pair(0)
    kept = compressed(chosen, update, sub_model, {}).keep
    other = replace(sub_model, ticket=replace(TICKET, more={"kernels": [1, 2]}))
    afresh = compressed(chosen, update, other, {})
    again = compressed(chosen, update, other, {**kept, "norm": torch.ones(1)})
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in afresh.tensors.items())
    assert set(again.keep) == set(afresh.keep) != set(kept)


def test_a_row_that_does_not_change_is_sent_as_zeros() -> None:
    sub_model, update = pair(0)
    same = replace(update, tensors=dict(sub_model.tensors))
    for form in FORMS:
        chosen = CommunicationConfig(update=form)
        got = restored(chosen, compressed(chosen, same, sub_model, {}), sub_model, same.tensors)
        assert torch.equal(got.tensors["w"], sub_model.tensors["w"])


def test_stacks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'communication.update: given "int8"; it needs training.stack = 1'):
        small.config(communication={"update": "int8"}, training={"stack": 4})


class KilledError(BaseException):
    """Nothing catches this."""


def kill(event: dict[str, Any]) -> None:
    """Ends a run during its third round."""
    if event["event"] == "client" and event["round"] == 3:
        raise KilledError


@pytest.mark.parametrize("form", ["top-k", pytest.param("int8", marks=pytest.mark.slow)])
def test_workers_and_a_resumed_run_end_with_the_same_bits(tmp_path: Path, form: str) -> None:
    changes: dict[str, Any] = {"communication": {"update": form}, "method": {"name": "heterofl"}}

    def final(name: str, options: dict[str, Any] | None = None, **more: Any) -> dict[str, Tensor]:
        run = small.experiment(**{**changes, **more}).run(tmp_path / name, **(options or {}))
        return flatten(run.state)[0]

    here, plain = final("here"), final("plain", communication={})
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in here.items())
    with pytest.raises(KilledError):
        final("cut", {"on_event": kill})
    for other in (final("there", engine={"name": "processes", "workers": 1}), final("cut", {"resume": True})):
        assert all(torch.equal(tensor, other[name]) for name, tensor in here.items())


def hostile(sent: dict[str, Tensor]) -> dict[str, tuple[str, dict[str, Tensor]]]:
    """Answers that no honest device gives, by the form they pretend to have."""
    name = next(name.removesuffix("/places") for name in sent if name.endswith("/places"))
    places, values = sent[f"{name}/places"], sent[f"{name}/values"]
    twice = places.clone()
    twice[1] = twice[0]
    return {
        "outside": ("outside its", {f"{name}/places": places + 100_000}),
        "negative": ("outside its", {f"{name}/places": places - 100_000}),
        "twice": ("given twice", {f"{name}/places": twice}),
        "whole": ("of type int64", {f"{name}/places": places.long()}),
        "more": ("of shape", {f"{name}/values": torch.cat([values, values])}),
        "infinite": ("not finite", {f"{name}/values": values * torch.inf}),
        "far": ("moved by", {f"{name}/values": values + 1e9}),
        "foreign": ("was not given", {name: torch.zeros(16, 64)}),
    }


def test_the_server_restores_an_honest_answer_and_refuses_hostile_ones() -> None:
    made = small.experiment(communication={"update": "top-k"}, method={"name": "heterofl"})
    size = made.sizes[-1]
    cut = made.method.extract(made.context, made.method.init(made.context), Client(0, 0, size, 1, 1, 0))
    message = replace(cut, ticket=replace(cut.ticket, rate=0.1))
    share = made.shares.share
    sent = ClientService(made.context.for_client(), made.method, share, sends=True).answer(message)
    here = ClientService(made.context.for_client(), made.method, share).answer(message)
    guard, note = Guard.of(made), sent.to_json()
    honest = guard(message, sent.tensors, note)
    assert isinstance(honest, Update), honest
    assert all(torch.equal(tensor, honest.tensors[name]) for name, tensor in here.tensors.items())
    assert all(name.startswith(FEEDBACK) for name in sent.keep)
    for words, changed in hostile(sent.tensors).values():
        refused = guard(message, sent.tensors | changed, note)
        assert isinstance(refused, Absence)
        assert words in refused.why


def test_the_server_refuses_a_factor_below_zero() -> None:
    made = small.experiment(communication={"update": "int8"}, method={"name": "heterofl"})
    cut = made.method.extract(made.context, made.method.init(made.context), Client(0, 0, made.sizes[-1], 1, 1, 0))
    message = replace(cut, ticket=replace(cut.ticket, rate=0.1))
    sent = ClientService(made.context.for_client(), made.method, made.shares.share, sends=True).answer(message)
    name = next(name for name in sent.tensors if name.endswith("/scale"))
    refused = Guard.of(made)(message, sent.tensors | {name: -sent.tensors[name] - 1}, sent.to_json())
    assert isinstance(refused, Absence)
    assert "factor below 0" in refused.why
