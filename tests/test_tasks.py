"""Tasks: the loss is torch's own, and metrics merge over any batching to what scikit-learn computes at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor

import anysize as az
from anysize.errors import ConfigError
from anysize.tasks import TASKS, NextToken, Sums, Task, add, label_set, task

CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=12)
SEEDS = st.integers(0, 1000)


def merged(kind: Task, output: Tensor, target: Tensor, cuts: Sequence[int]) -> dict[str, float]:
    """The metrics of the batches that `cuts` makes of the samples."""
    total: Sums = {}
    for part, truth in zip(output.split(list(cuts)), target.split(list(cuts))):
        add(total, kind.sums(part, truth))
    return kind.metrics(total)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20, deadline=None)
@given(CUTS, SEEDS)
def test_accuracy_and_cross_entropy_merge_over_any_batching(cuts: list[int], seed: int) -> None:
    logits = 3 * random(seed, sum(cuts), 5)
    labels = random(seed + 1, sum(cuts), 5).argmax(1)
    found = merged(task("classification"), logits, labels, cuts)
    assert found["accuracy"] == sk.accuracy_score(labels, logits.argmax(1))
    chances = torch.softmax(logits.double(), 1).numpy()
    assert found["loss"] == pytest.approx(sk.log_loss(labels, chances, labels=range(5)), rel=1e-5)
    assert float(task("classification").loss(logits, labels)) == pytest.approx(found["loss"], rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(CUTS, SEEDS)
def test_perplexity_is_the_exponential_of_the_mean_loss_over_all_symbols(cuts: list[int], seed: int) -> None:
    logits = random(seed, sum(cuts), 7, 6)
    symbols = random(seed + 1, sum(cuts), 7, 6).argmax(2)
    found = merged(task("next-token"), logits, symbols, cuts)
    chances = torch.softmax(logits.double(), 2).numpy().reshape(-1, 6)
    own = chances[np.arange(len(chances)), symbols.numpy().ravel()]
    assert found["perplexity"] == pytest.approx(np.exp(-np.log(own).mean()), rel=1e-5)
    assert found["accuracy"] == pytest.approx((chances.argmax(1) == symbols.numpy().ravel()).mean())
    assert float(task("next-token").loss(logits, symbols)) == pytest.approx(-np.log(own).mean(), rel=1e-5)


def test_a_hopeless_perplexity_is_large_not_an_error() -> None:
    found = task("next-token").metrics({"count": 1.0, "correct": 0.0, "loss": 1e6})
    assert math.isfinite(found["perplexity"])
    assert found["perplexity"] > 1e300


@settings(max_examples=20, deadline=None)
@given(CUTS, SEEDS, st.floats(-100, 100))
def test_r2_and_squared_error_merge_over_any_batching(cuts: list[int], seed: int, offset: float) -> None:
    truth = random(seed, sum(cuts) + 1) + offset
    said = truth + 0.5 * random(seed + 1, sum(cuts) + 1)
    found = merged(task("regression"), said, truth, [*cuts, 1])
    assert found["r2"] == pytest.approx(sk.r2_score(truth.double(), said.double()), rel=1e-6, abs=1e-6)
    assert found["loss"] == pytest.approx(sk.mean_squared_error(truth.double(), said.double()), rel=1e-6)


def test_targets_of_shape_n_fit_outputs_of_shape_n_by_1() -> None:
    said, truth = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1, 2, 3])
    assert float(task("regression").loss(said, truth)) == pytest.approx(1 / 3)
    assert task("regression").metrics(task("regression").sums(said, truth))["r2"] == pytest.approx(0.5)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6])
def test_equal_targets_leave_nothing_to_explain(value: float) -> None:
    truth = torch.full((7,), value, dtype=torch.float64)
    assert merged(task("regression"), truth + 1, truth, [3, 4])["r2"] == 0
    assert merged(task("regression"), truth + 1, truth, [7])["r2"] == 0  # whose rounding leaves a variance above zero


@settings(max_examples=20, deadline=None)
@given(CUTS, SEEDS)
def test_f1_merges_over_any_batching_to_the_micro_average(cuts: list[int], seed: int) -> None:
    logits = random(seed, sum(cuts), 4)
    truth = (random(seed + 1, sum(cuts), 4) > 0.5).float()
    found = merged(task("multilabel"), logits, truth, cuts)
    expected = sk.f1_score(truth.numpy(), (logits > 0).numpy(), average="micro", zero_division=0)
    assert found["f1"] == pytest.approx(expected)
    assert found["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, truth)), rel=1e-5)
    assert float(task("multilabel").loss(logits, truth.long())) == pytest.approx(found["loss"], rel=1e-5)


def test_f1_of_silence_is_zero() -> None:
    kind = task("multilabel")
    assert kind.metrics(kind.sums(-torch.ones(2, 3), torch.zeros(2, 3)))["f1"] == 0


@pytest.mark.parametrize("name", TASKS)
def test_every_task_reports_its_metric_and_a_loss(name: str) -> None:
    kind = task(name)
    per_token = issubclass(TASKS[name], NextToken)
    output = random(0, 3, 2, 4) if per_token else random(0, 3, 4)
    one_class = torch.ones(3, 2, dtype=torch.int64) if per_token else torch.tensor([0, 1, 2])
    target = one_class if per_token or name == "classification" else torch.ones(3, 4)
    found = kind.metrics(kind.sums(output, target))
    assert {kind.metric, "loss"} <= set(found)
    assert kind.loss(output, target).shape == ()


def test_the_label_set_is_numpys_unique() -> None:
    labels = torch.randint(0, 6, (4, 3), generator=torch.Generator().manual_seed(3))
    assert label_set(labels, 8).nonzero().flatten().tolist() == np.unique(labels.numpy()).tolist()


def test_an_own_task_is_found_by_name() -> None:
    own = task("own_task:Absolute")
    assert float(own.loss(torch.tensor([1.0, 3.0]), torch.zeros(2))) == 2.0


def test_an_own_task_trains_and_reports_its_own_metric(tmp_path: Path) -> None:
    x = random(0, 60, 4)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    run = az.Experiment(
        data=az.Data(train=(x, y), test=(x, y)),
        clients=4,
        model=net,
        method="heterofl",
        task="own_task:Absolute",
        devices={"capacities": [0.5, 1.0], "participation": 1.0},
        training={"learning_rate": 0.05, "local_epochs": 5, "batch_size": 5},
        rounds=6,
        evaluate_every=3,
    ).run(out=tmp_path / "run")
    scores = [event["mae"]["1.0"] for event in run.history if "mae" in event]
    assert len(scores) == 2
    assert scores[1] < 0.5 * float(y.abs().mean())


@pytest.mark.parametrize(
    "name, words",
    [
        ("clasification", "did you mean 'classification'"),
        ("own_task", "your own is named 'module:task'"),
        (":Absolute", "your own is named 'module:task'"),
        (".own_task:Absolute", "your own is named 'module:task'"),
        ("no_such_module:Absolute", "cannot import no_such_module"),
        ("own_task:Relative", "own_task has no 'Relative'"),
        ("own_task:number", "'int' object is not callable"),
        ("collections:Counter", "is a Counter, not an anysize.Task"),
    ],
)
def test_a_task_that_is_none_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task(name)
    assert words in str(caught.value)
