"""The processes of a device: `python -m anysize.deploy.process worker SETTINGS`, or `trial FILE CAPACITY`.

Both start without PyTorch's compiler and its package for algebra, of which a device needs neither: 70 MB of memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from anysize.engines.start import quick_start

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""The environment of these processes: what glibc keeps for the threads that fetch a message is then training's too."""


def command(name: str, *arguments: str) -> list[str]:
    """What starts such a process, as the name of a module here and the arguments of its `main`.

    >>> command("worker", "worker.json")[1:]
    ['-m', 'anysize.deploy.process', 'worker', 'worker.json']
    """
    return [sys.executable, "-m", "anysize.deploy.process", name, *arguments]


def afresh(arguments: Sequence[str]) -> None:
    """Go on as `anysize` with these arguments, where a process can become another; its memory is then free again."""
    if os.name == "posix":
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "anysize", *arguments])


def main(name: str, arguments: Sequence[str]) -> None:
    """Be the process."""
    quick_start()  # before anything imports torch
    import_module(f"anysize.deploy.{name}").main(*arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
