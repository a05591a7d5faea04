"""Random changes to a batch of training images: different for each sample, computed for all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from anysize.errors import ConfigError, DataError, unknown

PADDING = 4
"""Black pixels added on every side before a crop."""


def augment(x: Tensor, names: Sequence[str], generator: torch.Generator) -> Tensor:
    """A batch of images changed at random by each named augmentation in turn; the shape stays.

    Args:
        x: (N, C, H, W), floating point.
        names: "crop" shifts each image by up to 4 pixels, "flip" mirrors half of them.
        generator: the source of randomness; a CPU generator, whatever the device of `x`.

    >>> from anysize.rng import generator
    >>> augment(torch.ones(2, 1, 8, 8), ["crop", "flip"], generator(0, "doc")).shape
    torch.Size([2, 1, 8, 8])
    """
    for name in names:
        if name not in _CHANGES:
            raise ConfigError(unknown("augmentation", name, _CHANGES))
    if names and (x.ndim != 4 or not x.is_floating_point()):
        raise DataError(
            f"{', '.join(names)} can only change images (N, C, H, W) of floats, "
            f"not {x.dtype} of shape {tuple(x.shape)}; set data.augment = []"
        )
    for name in names:
        x = _CHANGES[name](x, generator)
    return x


def _crop(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image padded with 4 black pixels on every side and cut back to its size at a random place."""
    samples, channels, height, width = x.shape
    offset = torch.randint(2 * PADDING + 1, (2, samples, 1), generator=generator).to(x.device)
    rows = offset[0] + torch.arange(height, device=x.device)  # (N, H)
    columns = offset[1] + torch.arange(width, device=x.device)  # (N, W)
    padded = functional.pad(x, (PADDING,) * 4)  # (N, C, H + 8, W + 8)
    sample = torch.arange(samples, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image mirrored left to right with probability one half."""
    mirrored = torch.randint(2, (len(x), 1, 1, 1), generator=generator).to(x.device)
    return torch.where(mirrored.bool(), x.flip(3), x)


_CHANGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {"crop": _crop, "flip": _flip}
