"""Plain networks by name, for any input size and number of outputs."""

from anysize.models.normalize import Normalize, normalized
from anysize.models.registry import build, defaults, models

__all__ = ["Normalize", "build", "defaults", "models", "normalized"]
