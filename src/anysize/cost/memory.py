"""The memory of a training step, and what a machine has."""

from __future__ import annotations

from pathlib import Path

from anysize.config.tables import TrainingConfig


def training_bytes(training: TrainingConfig, network: int, held: int) -> int:
    """The memory that training takes: the network, its gradients, the optimizer, the message that came, the answer, and
    the activations of a step.

    >>> training_bytes(TrainingConfig(momentum=0.0), network=100, held=50)
    450
    """
    optimizer = 2 if training.optimizer == "adam" else 1 if training.momentum else 0
    return (4 + optimizer) * network + held


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
