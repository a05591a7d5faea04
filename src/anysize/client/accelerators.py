"""Where clients' tensors are while they train: on the CPU, or on a GPU if there is one."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from anysize.errors import ConfigError

Module = TypeVar("Module", bound=nn.Module)


def device(name: str, *, or_cpu: bool = False) -> torch.device:
    """The device of `engine.accelerator`; raises an error that says what to do if there is no such device.

    Args:
        name: "auto", "cpu", "cuda" or "mps".
        or_cpu: use the CPU instead of raising an error, for a run from another machine.

    >>> device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name not in present:
        raise ConfigError(f"engine.accelerator = '{name}'; allowed: auto, {', '.join(present)}")
    if not present[name] and or_cpu:
        name = "cpu"
    if not present[name]:
        there = ", ".join(kind for kind, is_there in present.items() if is_there)
        raise ConfigError(
            f"engine.accelerator = '{name}', but PyTorch finds no such device here (there is: {there}); install a "
            f'PyTorch built for it, or set engine.accelerator = "auto"'
        )
    if name == "cuda":  # choosing the fastest kernel by timing would differ from run to run
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    return torch.device(name)


def place(module: Module, where: torch.device) -> Module:
    """The module, with its tensors moved to a device; placeholders on the meta device stay there.

    >>> next(place(nn.Linear(2, 1), torch.device("cpu")).parameters()).device
    device(type='cpu')
    """
    if where.type == "cpu" and where.index is None:
        return module
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(where))  # type: ignore[no-untyped-call]
    return module
