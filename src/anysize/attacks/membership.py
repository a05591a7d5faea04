"""Was this sample trained on? An attack by whoever has a finished network: samples with a small loss were."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anysize.data import Part, to_input


def membership_advantage(network: nn.Module, members: Part, others: Part, most: int = 2000) -> float:
    """How much more often the attack says "trained on" of a member than of another sample, at its best threshold.

    0: it guesses; 1: it is always right (Yeom et al. 2018). A little above 0 is luck, since the threshold is chosen
    afterwards.

    Args:
        network: of classes.
        members: samples that it was trained on.
        others: samples that it was not trained on.
        most: how many of each are tried.
    """
    inside, outside = (_losses(network, part, most) for part in (members, others))
    thresholds = torch.cat([inside, outside])[:, None]
    found = (inside <= thresholds).double().mean(1) - (outside <= thresholds).double().mean(1)
    return max(0.0, float(found.max()))


def _losses(network: nn.Module, part: Part, most: int) -> Tensor:
    x, y = part.batch(torch.arange(min(len(part), most)))
    with torch.no_grad():
        return cross_entropy(network.eval()(to_input(x)), y.long(), reduction="none")
