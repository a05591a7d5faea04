"""The pieces of an evaluation, and who may measure them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

import anysize as az
from anysize.client.metrics import measure
from anysize.client.shards import Evaluator, Subject, stretches
from anysize.client.work import perform
from anysize.methods import HeteroFL
from anysize.methods.messages import Client
from anysize.server.judging import on_test
from anysize.testing import make_trial
from anysize.wire import dump


@pytest.mark.parametrize("samples, batch_size", [(1, 8), (40, 7), (2500, 100), (1001, 1000)])
def test_shards_of_a_size_are_the_whole_test_set_once(samples: int, batch_size: int) -> None:
    trial = make_trial(HeteroFL(), None, (0.5, 1.0), None)
    part = az.Share(train=(torch.zeros(samples, 1, 8, 8), torch.zeros(samples, dtype=torch.int64))).train
    evaluator = Evaluator(trial.context, trial.method, part, batch_size)
    shards = evaluator.shards(trial.context.sizes)
    for size in trial.context.sizes:
        own = [shard for shard in shards if shard.size == size]
        assert own[0].first == 0
        assert own[-1].last == len(evaluator._batches)
        assert all(one.last == other.first for one, other in itertools.pairwise(own))
    assert shards[0].size == trial.context.largest


def test_stretches_have_enough_samples_but_for_the_last() -> None:
    lengths = [3, 9, 1, 1, 1, 8, 2]
    found = stretches(lengths, 5)
    sums = [sum(lengths[first:last]) for first, last in found]
    assert min(sums[:-1]) >= 5
    assert sum(sums) == sum(lengths)


def test_the_metrics_are_those_of_one_pass_over_the_test_set() -> None:
    trial = make_trial(HeteroFL(), None, (0.5, 1.0), None)
    torch.manual_seed(0)
    x, y = torch.rand(1300, 1, 8, 8), torch.randint(4, (1300,))
    found = on_test(trial.context, trial.method, trial.state, az.Share(train=(x, y)).train, {}, 100)
    for size in trial.context.sizes:
        network = trial.method.customize(trial.context, trial.state, size).eval()
        output = network(x).detach().double().numpy()
        expected = np.mean(output.argmax(1) == y.numpy())
        assert found[size.label]["accuracy"] == pytest.approx(expected, abs=2 / 1300)
        shifted = output - output.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y.numpy()]
        assert found[size.label]["loss"] == pytest.approx(losses.mean(), rel=1e-4)


def test_a_single_sample_is_judged_and_counted_once() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    trial = make_trial(HeteroFL(), network, (0.5, 1.0), None)
    share = az.Share(train=(torch.rand(1, 1, 8, 8), torch.tensor([2])))
    module = trial.method.customize(trial.context, trial.state, trial.context.largest)
    assert measure(trial.context, module, share.train)["count"] == 1
    message = trial.method.extract(trial.context, trial.state, Client(0, 0, trial.context.largest, 1, 1, 0))
    update = perform(
        trial.context, trial.method, replace(message, ticket=replace(message.ticket, job="calibrate")), share
    )
    assert update.tensors["0.count"] == 1


def test_a_client_calibrates_on_no_more_samples_than_asked() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    trial = make_trial(HeteroFL(), network, (0.5, 1.0), None)
    share = az.Share(train=(torch.rand(30, 1, 8, 8), torch.arange(30) % 4))
    message = trial.method.extract(trial.context, trial.state, Client(0, 0, trial.context.largest, 1, 30, 0))
    ticket = replace(message.ticket, job="calibrate", calibration_samples=12)
    update = perform(trial.context, trial.method, replace(message, ticket=ticket), share)
    assert update.tensors["0.count"] == 12


def test_a_subject_comes_out_of_the_wire_as_it_went_in() -> None:
    trial = make_trial(HeteroFL(), None, (0.5, 1.0), None)
    wired = Subject(trial.state).to_wire()
    assert wired is not None
    again = Subject.of(*wired)
    assert type(again.state) is type(trial.state)
    assert dump(again.state.tensors, {}) == dump(trial.state.tensors, {})


def test_a_state_whose_class_has_no_name_stays_in_its_process() -> None:
    @dataclass(frozen=True)
    class Nameless:
        tensors: dict[str, torch.Tensor]

    assert Subject(Nameless({})).to_wire() is None
