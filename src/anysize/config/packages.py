"""Packages of Hugging Face and of networks, imported when a name asks for one."""

from __future__ import annotations

import importlib
from typing import Any

from anysize.config.extras import needs
from anysize.errors import ConfigError

_OPERATORS: list[Any] = []


def load(package: str, what: str) -> Any:
    """The package, imported; an error that says how to install it if it is missing.

    Args:
        package: transformers, datasets, timm or torchvision.
        what: who needs it.
    """
    missing = needs(what, "vision" if package in ("timm", "torchvision") else "hf", package)
    if missing is not None:
        raise ConfigError(missing)
    load_torchvision()
    return importlib.import_module(package)


def load_torchvision() -> None:
    """Import torchvision, if it is installed, also where its operators do not load, as those of a wheel for other
    devices; transformers and timm import it, and no network needs its operators.
    """
    if _OPERATORS:
        return
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        import torch

        library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _OPERATORS.append(library)
        importlib.import_module("torchvision")
