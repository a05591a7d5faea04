"""What attackers learn from in place of their data: false labels, or pictures with a trigger."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from anysize.data import Part, Share, Shares, to_input
from anysize.inputs import Input, one_tensor

ON_DATA = ("label-flip", "backdoor")
"""The attacks that change an attacker's data."""

TARGET = 0
"""The class that a picture with the trigger is to be taken for."""

_SIDE = 3  # pixels of the trigger


def stamped(x: Tensor) -> Tensor:
    """The pictures (samples, channels, height, width) with the trigger: a white square in the lower right corner.

    >>> stamped(torch.zeros(1, 1, 4, 4, dtype=torch.uint8)).sum().item() == 9 * 255
    True
    """
    changed = x.clone()
    changed[..., -_SIDE:, -_SIDE:] = 1.0 if x.is_floating_point() else 255
    return changed


def flipped(labels: Tensor, classes: int) -> Tensor:
    """Every class in place of its opposite: 0 for the last, 1 for the last but one.

    >>> flipped(torch.tensor([0, 1, 9]), 10).tolist()
    [9, 8, 0]
    """
    return classes - 1 - labels


class FlippedPart:
    """Samples with flipped labels."""

    def __init__(self, part: Part, classes: int) -> None:
        self._part, self._classes = part, classes

    def __len__(self) -> int:
        return len(self._part)

    def batch(self, index: Tensor) -> tuple[Input, Tensor]:
        x, y = self._part.batch(index)
        return x, flipped(y, self._classes)

    def labels(self) -> Tensor:
        return flipped(self._part.labels(), self._classes)


class StampedPart:
    """Samples of which every second has the trigger, and the class that it stands for."""

    def __init__(self, part: Part) -> None:
        self._part = part

    def __len__(self) -> int:
        return len(self._part)

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        found, y = self._part.batch(index)
        x = one_tensor(found, "a backdoor")
        chosen = index % 2 == 0
        pictures = torch.where(chosen.reshape(-1, *[1] * (x.dim() - 1)), stamped(x), x)
        return pictures, torch.where(chosen, torch.full_like(y, TARGET), y)

    def labels(self) -> Tensor:
        labels = self._part.labels()
        return torch.where(torch.arange(len(labels)) % 2 == 0, torch.full_like(labels, TARGET), labels)


class Poisoned(Shares):
    """The clients' data, where attackers train on data of their own making; what they hold out stays honest.

    Args:
        shares: the honest data.
        name: the attack, one of `ON_DATA`.
        classes: how many classes the task has.
        attackers: says who attacks; asked when the first share is.
    """

    def __init__(self, shares: Shares, name: str, classes: int, attackers: Callable[[], Collection[int]]) -> None:
        self._shares, self._name, self._classes, self._attackers = shares, name, classes, attackers

    def __len__(self) -> int:
        return len(self._shares)

    def share(self, client: int) -> Share:
        """The data of one client."""
        honest = self._shares.share(client)
        if client not in self._attackers():
            return honest
        flips = self._name == "label-flip"
        return Share(FlippedPart(honest.train, self._classes) if flips else StampedPart(honest.train), honest.held_out)

    def samples(self, client: int) -> int:
        """The number of training samples of one client."""
        return self._shares.samples(client)

    def group_of(self, client: int) -> str | None:
        """The name of the client's data group, if it has one."""
        return self._shares.group_of(client)

    @property
    def used(self) -> Tensor:
        """The numbers of the samples that any client has, sorted."""
        return self._shares.used


def backdoor_success(network: nn.Module, part: Part, batch_size: int = 500) -> float:
    """The share of pictures of other classes that a network takes for the target's as soon as they have the trigger."""
    network = network.eval()
    fooled = others = 0
    for index in torch.split(torch.arange(len(part)), batch_size):
        x, y = part.batch(index)
        with torch.no_grad():
            taken = network(to_input(stamped(one_tensor(x, "a backdoor")))).argmax(1) == TARGET
        fooled += int((taken & (y != TARGET)).sum())
        others += int((y != TARGET).sum())
    return fooled / others
