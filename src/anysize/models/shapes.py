"""Checks of a network's input, with clearer errors than torch would raise later."""

from __future__ import annotations

from collections.abc import Sequence

from anysize.errors import ModelError

SMALLEST_IMAGE = 8
"""Height and width that every convolutional network here can take."""


def image(name: str, input_shape: Sequence[int]) -> tuple[int, int, int]:
    """Channels, height and width of an input; refuses anything but an image of at least 8 x 8.

    >>> image("small-cnn", (1, 28, 28))
    (1, 28, 28)
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < SMALLEST_IMAGE:
        raise ModelError(
            f"model '{name}' takes images (channels, height, width) of at least {SMALLEST_IMAGE} x "
            f"{SMALLEST_IMAGE}, not {tuple(input_shape)}; 'mlp' takes any shape"
        )
    channels, height, width = input_shape
    return channels, height, width


def positive(name: str, **sizes: int | Sequence[int]) -> None:
    """Raise an error that names every size that is not a whole number of at least 1, or is an empty list."""
    problems = [
        f"model '{name}': {key} is {value}; allowed: whole numbers of at least 1"
        for key, value in sizes.items()
        if not _all_positive(value)
    ]
    if problems:
        raise ModelError("\n".join(problems))


def _all_positive(value: int | Sequence[int]) -> bool:
    values = [value] if not isinstance(value, Sequence) else value
    return bool(values) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in values)
