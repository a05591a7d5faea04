"""The user's own code by name: "package.module:attribute"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

from anysize.errors import ConfigError, unknown


def look_in(folder: Path) -> None:
    """Let `by_name` import modules from a folder: that of the experiment file, or of the device."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)


def by_name(name: str, kind: str, known: Iterable[str]) -> Any:
    """The object that "module:attribute" names, or an error that says what exists.

    >>> by_name("math:sqrt", "function", {})(9.0)
    3.0
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.startswith("."):
        raise ConfigError(f"{unknown(kind, name, known)}; your own is named 'module:{kind}'")
    try:
        return attrgetter(attribute)(importlib.import_module(module))
    except ImportError as error:
        raise ConfigError(
            f"{kind} '{name}': cannot import {module} ({error}); is the module in the folder of the experiment file?"
        ) from None
    except AttributeError:
        raise ConfigError(f"{kind} '{name}': {module} has no '{attribute}'") from None
