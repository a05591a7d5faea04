"""The whole way on real data: every method and every task really learns something at every size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anysize as az

TEXT = (
    "a small device trains a small network and a large device trains a large network; "
    "what they learn is merged into one model that can be cut to any size. "
)


def on_digits(out: Path, method: str, **tables: Any) -> az.Run:
    """A run on the bundled handwritten digits, 12 devices of two sizes."""
    return az.Experiment(
        data="digits",
        clients=12,
        model={"name": "small-cnn", "options": {"channels": [8, 16]}},
        method=method,
        devices={"capacities": [0.5, 1.0]},
        training={"learning_rate": 0.05, "batch_size": 16, "local_epochs": 2, "schedule": "cosine"},
        evaluate_every=100,
        **tables,
    ).run(out)


@pytest.mark.parametrize(
    "method, least",
    [
        ("flanc", 0.8),
        *(
            pytest.param(name, least, marks=pytest.mark.slow)
            for name, least in (("fedavg", 0.85), ("heterofl", 0.8), ("prism", 0.8))
        ),
    ],
)
def test_digits_are_learned_at_every_size(tmp_path: Path, method: str, least: float) -> None:
    run = on_digits(tmp_path / "run", method, rounds=8)
    final = run.history[-1]["accuracy"]
    assert set(final) == ({"0.5"} if method == "fedavg" else {"0.5", "1.0"})
    assert min(final.values()) >= least, final
    losses = [event["train_loss"] for event in run.history]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("method, least", [("heterofl", 0.6), pytest.param("flanc", 0.65, marks=pytest.mark.slow)])
def test_digits_are_learned_from_clients_with_three_classes_each(tmp_path: Path, method: str, least: float) -> None:
    run = on_digits(tmp_path / "run", method, rounds=10, partition={"split": "classes", "classes_per_client": 3})
    for client in range(12):
        assert len(set(run.experiment.shares.share(client).train.labels().tolist())) <= 3
    final = run.history[-1]["accuracy"]
    assert min(final.values()) >= least, final


@pytest.mark.parametrize("method", ["flanc", pytest.param("heterofl", marks=pytest.mark.slow)])
def test_the_next_character_of_a_little_text_is_learned(tmp_path: Path, method: str) -> None:
    symbols = sorted(set(TEXT))
    tokens = np.array([symbols.index(sign) for sign in TEXT * 12])
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 21)[::3]
    x, y = windows[:, :-1].copy(), windows[:, 1:].copy()
    data = az.Data(train=(x[:-100], y[:-100]), test=(x[-100:], y[-100:]))
    run = az.Experiment(
        data=data,
        clients=4,
        model={"name": "char-lstm", "options": {"embedding": 8, "hidden": 32}},
        method=method,
        task="next-token",
        devices={"capacities": [0.5, 1.0]},
        training={"learning_rate": 0.02, "optimizer": "adam", "batch_size": 16},
        rounds=8,
        evaluate_every=8,
    ).run(tmp_path / "run")
    shares = np.bincount(tokens) / len(tokens)
    by_frequency_alone = float(np.exp(-(shares[shares > 0] * np.log(shares[shares > 0])).sum()))
    perplexity = run.history[-1]["perplexity"]
    assert max(perplexity.values()) < by_frequency_alone / 1.5, (perplexity, by_frequency_alone)


@pytest.mark.parametrize(
    "method, integers", [("fedavg", False), ("heterofl", False), ("flanc", False), ("fedavg", True)]
)
def test_a_regression_is_learned(tmp_path: Path, method: str, integers: bool) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 6)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5, 0.0, 1.0, 0.3], np.float32) + np.abs(x[:, 0])).astype(np.float32)
    if integers:
        y = np.round(y + 20).astype(np.int64)
    run = az.Experiment(
        data=az.Data(train=(x[:300], y[:300]), test=(x[300:], y[300:])),
        clients=4,
        model={"name": "mlp", "options": {"hidden": [32, 32]}},
        method=method,
        task="regression",
        devices={"capacities": [0.5, 1.0]},
        training={"learning_rate": 0.01, "batch_size": 16, "local_epochs": 3, "clip": 5.0},
        rounds=10,
        evaluate_every=10,
    ).run(tmp_path / "run")
    final = run.history[-1]["r2"]
    assert min(final.values()) > 0.8, final


@pytest.mark.parametrize(
    "method, kind", [("fedavg", np.float32), ("heterofl", np.float32), ("flanc", np.float32), ("flanc", np.int64)]
)
def test_several_labels_a_sample_are_learned(tmp_path: Path, method: str, kind: type) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 6)).astype(np.float32)
    y = (x @ random.normal(size=(6, 5)) > 0).astype(kind)
    run = az.Experiment(
        data=az.Data(train=(x[:300], y[:300]), test=(x[300:], y[300:])),
        clients=4,
        model={"name": "mlp", "options": {"hidden": [32, 32]}},
        method=method,
        task="multilabel",
        devices={"capacities": [0.5, 1.0]},
        training={"learning_rate": 0.1, "batch_size": 16, "local_epochs": 3},
        rounds=10,
        evaluate_every=10,
    ).run(tmp_path / "run")
    final = run.history[-1]["f1"]
    assert min(final.values()) > 0.75, final
    assert sum(parameter.shape[0] == 5 for parameter in run.customize().parameters()) >= 1
