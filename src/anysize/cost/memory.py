"""The memory of a training step and of the process that takes it, and what a machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anysize.config.tables import TrainingConfig


def training_bytes(training: TrainingConfig, network: int, held: int) -> int:
    """The memory that training takes: the network, its gradients, the optimizer, the message that came, the answer, and
    the activations of a step.

    >>> training_bytes(TrainingConfig(momentum=0.0), network=100, held=50)
    450
    """
    return (4 + _per_parameter(training)) * network + held


PROCESS_BYTES = 48_000_000
"""What a process loads when it joins and its first message comes: PyTorch's kernels and functions for shapes."""
_PER_TENSOR = 220_000  # of the network, for what tracing makes and remembers of the layer
_COPIES = 8  # of the network: itself, gradients, tested, as it came, in parts, as read, as it leaves, in parts
_HELD = 1.5  # of what a step holds: gradients of activations come and go, and leave gaps in the heap
_LSTM = 2.7  # of an LSTM's gates, which oneDNN keeps and works with besides what autograd holds


def process_bytes(training: TrainingConfig, network: int, tensors: int, held: int, scratch: int) -> int:
    """The memory that a device's process takes above one that has only imported anysize, at its peak.

    The constants come from real processes: `benchmarks/device_memory.py` says which, and compares others.

    Args:
        training: the local training options.
        network: the bytes of the network's tensors.
        tensors: their number.
        held: what a step holds for its backward pass.
        scratch: what its layers take besides; see `Scratch`.

    >>> process_bytes(TrainingConfig(momentum=0.0), network=1_000, tensors=0, held=10_000, scratch=0) - PROCESS_BYTES
    23000
    """
    resting = PROCESS_BYTES + _PER_TENSOR * tensors + (_COPIES + _per_parameter(training)) * network
    return resting + round(_HELD * held) + scratch


class Scratch:
    """While it is active, notes the memory that the layers of a network take besides what autograd holds."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [layer for layer in module.modules() if isinstance(layer, nn.LSTM)]
        self._found: dict[int, float] = {}
        self._handles: list[RemovableHandle] = []

    @property
    def total(self) -> int:
        """The sum over the layers, of each the most of its calls."""
        return round(sum(self._found.values()))

    def __enter__(self) -> Scratch:
        self._handles = [layer.register_forward_pre_hook(self._note) for layer in self._layers]
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, layer: Any, given: tuple[Any, ...]) -> None:
        x = given[0]
        if not isinstance(x, Tensor):  # a packed sequence
            x = x.data
        directions = 2 if layer.bidirectional else 1
        gates = 4 * layer.hidden_size * layer.num_layers * directions * x[..., 0].numel() * x.element_size()
        self._found[id(layer)] = max(self._found.get(id(layer), 0.0), _LSTM * gates)


def _per_parameter(training: TrainingConfig) -> int:
    """How many numbers the optimizer holds for each parameter."""
    return 2 if training.optimizer == "adam" else 1 if training.momentum else 0


def available_bytes() -> int | None:
    """How much memory this process can still allocate, within the machine and its control group; None if unknown.

    >>> available_bytes() is None or available_bytes() > 0
    True
    """
    known = [amount for amount in (_of_machine(), _of_group()) if amount is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_group() -> int | None:
    """The memory left within the limit of a control group, such as a container's."""
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, now = (next(iter(_lines(Path(path))), "").strip() for path in (most, used))
        if limit.isdecimal() and now.isdecimal():
            return max(0, int(limit) - int(now))
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
