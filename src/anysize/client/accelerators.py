"""Where clients' tensors are while they train: on the CPU, or on a GPU if there is one; and what it computes fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from anysize.errors import ConfigError
from anysize.inputs import Input, mapped
from anysize.wire import Tensors

Module = TypeVar("Module", bound=nn.Module)
Precision = Literal["float32", "bf16", "fp16"]


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


def moved(x: Input, where: torch.device) -> Any:
    """A tensor or named ones on the device that trains; a GPU fetches them while it still works on what came before."""
    if not _by_itself(where):
        return x.to(where)
    return mapped(x, lambda one: one.pin_memory().to(where, non_blocking=True))


def brought(tensors: Mapping[str, Tensor], where: torch.device) -> Tensors:
    """Copies on the processor of tensors on the device that trains, or already here; a GPU is waited for once."""
    if not _by_itself(where):
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    found = {
        name: torch.empty_like(tensor, device="cpu").pin_memory().copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    torch.cuda.synchronize()
    return found


def _by_itself(where: torch.device) -> bool:
    """Whether the device reads and writes memory here by itself, if that is pinned."""
    return where.type == "cuda"


def share_gpus(worker: int) -> None:
    """Let this worker process use one of the GPUs, which the workers take in turns; several share one.

    Call it in the worker, not before it is forked: a process that has used CUDA cannot be forked.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(worker % torch.cuda.device_count())


def precision(name: Precision, where: torch.device, *, or_float32: bool = False) -> Precision:
    """The precision of `training.precision`; raises an error if it would be slower here than float32.

    Args:
        name: what the experiment asks for.
        where: the device that trains.
        or_float32: train in float32 instead of raising an error, for a run from another machine.

    >>> precision("float32", torch.device("cpu"))
    'float32'
    """
    if name == "float32" or name in _fast(where):
        return name
    if or_float32:
        return "float32"
    there = ", ".join(["float32", *sorted(_fast(where))])
    raise ConfigError(f'training.precision = "{name}": {where.type} has no units for it here (there is: {there})')


def _fast(where: torch.device) -> set[str]:
    """The precisions below float32 that a device computes faster; mps was never tried."""
    if where.type == "cuda":
        return {"fp16"} | ({"bf16"} if torch.cuda.is_bf16_supported(including_emulation=False) else set())
    if where.type != "cpu":
        return set()
    units = [name for name, there in torch.cpu.get_capabilities().items() if there is True]
    return {kind for kind in ("bf16", "fp16") if any(kind in unit for unit in units)}


def place(module: Module, where: torch.device) -> Module:
    """The module, with its tensors moved to a device; placeholders on the meta device stay there.

    >>> next(place(nn.Linear(2, 1), torch.device("cpu")).parameters()).device
    device(type='cpu')
    """
    if where.type == "cpu" and where.index is None:
        return module
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(where))  # type: ignore[no-untyped-call]
    return module
