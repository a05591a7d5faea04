"""Plain networks by name, for any input size and number of outputs."""

from anysize.models.hub import check_head, check_targets, learned, logits
from anysize.models.keyed import Keyed, check_network, keyed, logits_of, plain, positions, vocabulary
from anysize.models.normalize import Normalize, normalized
from anysize.models.registry import build, defaults, models

__all__ = [
    "Keyed",
    "Normalize",
    "build",
    "check_head",
    "check_network",
    "check_targets",
    "defaults",
    "keyed",
    "learned",
    "logits",
    "logits_of",
    "models",
    "normalized",
    "plain",
    "positions",
    "vocabulary",
]
