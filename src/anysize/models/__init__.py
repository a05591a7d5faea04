"""Plain networks by name, for any input size and number of outputs."""

from anysize.models.hub import check_head, learned, logits
from anysize.models.keyed import Keyed, keyed, logits_of, plain, positions, vocabulary
from anysize.models.normalize import Normalize, normalized
from anysize.models.registry import build, defaults, models

__all__ = [
    "Keyed",
    "Normalize",
    "build",
    "check_head",
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
