"""Where clients run: an engine takes sub-models, and gives updates in the same order."""

from anysize.engines.base import Absence, Engine
from anysize.engines.inprocess import InProcess

__all__ = ["Absence", "Engine", "InProcess"]
