"""Pairs of training digits only, on which the demo was chosen: a quarter of these digits is held out to judge by."""

from __future__ import annotations

import numpy as np

import anysize as az
from anysize.data import load
from anysize.data.sources import _held_out, from_arrays


def pairs() -> az.Data:
    """4,000 pairs to train on, and as the test part 1,000 pairs of the digits that are held out."""
    digits = load("digits").train
    x, y = digits.x[:, 0].numpy(), digits.labels().numpy()
    held = _held_out(y, 0.25, "search")
    rng = np.random.default_rng(5)
    x_train, y_train = _pairs(x[~held], y[~held], 4_000, rng)
    x_test, y_test = _pairs(x[held], y[held], 1_000, rng)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    return from_arrays(arrays, source="scikit-learn's digits")


def _pairs(x: np.ndarray, y: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    left, right = rng.integers(len(x), size=(2, count))
    return np.concatenate([x[left], x[right]], axis=2), 10 * y[left] + y[right]
