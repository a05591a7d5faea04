"""Ctrl-C and SIGTERM: they set a flag that a run checks between two steps.

Python raises KeyboardInterrupt at any instruction. Destructors and callbacks swallow it, and a run would continue with
half a step done. So during a run the first signal only sets a flag, and code that can stop safely checks it with
`check`: between steps, between messages, between clients. A second signal does not wait.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal

_SIGNALS = ("SIGINT", "SIGTERM")
_ALSO_WHILE_WAITING = ("SIGHUP",)  # not on Windows
_SHOW_CURSOR = "\033[?25h"  # a progress bar hides it

_mode: Literal["note", "raise", "end"] | None = None  # what a first signal does; None: our handlers are not installed
_asked: int | None = None  # the signal that asked to stop
_hosts: dict[int, Any] = {}  # the handlers that were there before ours
_owner = 0  # the process that installed ours
_is_command = False  # whether that process is a command of anysize


def check() -> None:
    """Raises KeyboardInterrupt if this process was asked to stop.

    >>> check()
    """
    if _asked is not None:
        raise KeyboardInterrupt


def pause(seconds: float) -> None:
    """Sleeps, and raises KeyboardInterrupt if this process was asked to stop."""
    check()
    time.sleep(seconds)
    check()


def exit_code() -> int:
    """The exit code of a stopped command: 130 after Ctrl-C, 143 after SIGTERM.

    >>> exit_code()
    130
    """
    return 128 + (_asked or signal.SIGINT)


def command() -> None:
    """For a command of anysize: from now on a signal ends it at once with one line, except where code defers it.

    Call it before other modules load: no code can then swallow the signal, and nothing is lost.
    """
    global _mode, _is_command
    _mode, _is_command = "end", True
    _take(_SIGNALS)


@contextmanager
def deferred(host: bool = False) -> Iterator[None]:
    """Inside, a first SIGINT or SIGTERM waits for the next `check`, which raises KeyboardInterrupt; a second does not.

    Outside the main thread, and if handlers are not Python's, nothing changes. A signal other than Ctrl-C reaches its
    original handler at the end of the block, so SIGTERM still ends a script.

    Args:
        host: also replace handlers of another library; they are called at the end of the block.
    """
    with _answered("note", _SIGNALS, host):
        yield


@contextmanager
def immediate() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt at once.

    For commands that only wait for other processes, and must stop them.
    """
    with _answered("raise", (*_SIGNALS, *_ALSO_WHILE_WAITING)):
        yield


@contextmanager
def _answered(mode: Literal["note", "raise"], names: Collection[str], host: bool = False) -> Iterator[None]:
    global _mode, _asked
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, taken = _mode, list[int]()
    try:
        _mode = mode
        taken = _take(names, host)
        check()
        yield
        check()
    finally:
        asked, _mode = _asked, outer
        before = {number: _hosts.pop(number) for number in taken}
        for number, handler in before.items():
            signal.signal(number, handler)
        if outer is None:
            _asked = None
        raised = isinstance(sys.exception(), KeyboardInterrupt)
        if asked is not None and asked in before and not (raised and before[asked] is signal.default_int_handler):
            signal.raise_signal(asked)


def _take(names: Collection[str], host: bool = False) -> list[int]:
    """Replace Python's handlers (with `host`, any that do not ignore the signal) by ours; return for which signals."""
    global _owner
    _owner = os.getpid()
    taken = []
    for number in [getattr(signal, name) for name in names if hasattr(signal, name)]:
        before = signal.getsignal(number)
        plain = before in (signal.SIG_DFL, signal.default_int_handler)
        if plain or (host and callable(before) and before is not _on_signal):
            _hosts[number] = before
            signal.signal(number, _on_signal)
            taken.append(number)
    return taken


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _asked
    if os.getpid() != _owner:  # in a fork, the default handler must end the process
        _by_default(number)
    elif _mode == "end" or _asked is not None:
        _end(number, frame)
    else:
        _asked = number
        if _mode == "raise":
            raise KeyboardInterrupt
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        _say(f"stopping after this step; {again} to end at once")


def _end(number: int, frame: FrameType | None) -> None:
    """End a command of anysize; in another process, do what its own handler does."""
    if _is_command:
        _say("stopped", _SHOW_CURSOR)
        os._exit(128 + number)
    before = _hosts.get(number)
    if callable(before):
        before(number, frame)
    else:
        _by_default(number)


def _by_default(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _say(text: str, first: str = "") -> None:
    """Write a line to the terminal, not through Python's streams: this process may be in the middle of a write."""
    with suppress(OSError):
        lead = f"{first}\n" if os.isatty(2) else ""  # below a progress bar or "^C"
        os.write(2, f"{lead}{text}\n".encode())
