"""Plain networks by name, for any input size and number of outputs."""

from anysize.models.hub import learned, logits
from anysize.models.keyed import Keyed, keyed, logits_of, plain, vocabulary
from anysize.models.normalize import Normalize, normalized
from anysize.models.registry import build, defaults, models

__all__ = [
    "Keyed",
    "Normalize",
    "build",
    "defaults",
    "keyed",
    "learned",
    "logits",
    "logits_of",
    "models",
    "normalized",
    "plain",
    "vocabulary",
]
