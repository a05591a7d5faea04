"""Errors that a user can act on: what was given, what is allowed, what to do."""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path


class AnysizeError(Exception):
    """Base of every error that a user can fix; the command line prints it and exits with 2."""


class ConfigError(AnysizeError):
    """The experiment file, or a value given instead, cannot be run."""


class UsageError(AnysizeError):
    """A command was given options that do not go together, or a value that cannot be read."""


class DataError(AnysizeError):
    """A data set is missing, damaged, or too small for what was asked."""


class ModelError(AnysizeError):
    """A module cannot be traced, narrowed or exported as asked."""


class MethodError(AnysizeError):
    """A method cannot do what was asked, with this model or at this size."""


class CheckpointError(AnysizeError):
    """A run directory or a checkpoint is damaged, foreign, or in the way."""


class TrustError(AnysizeError):
    """Something from outside was refused: an update, a sub-model, or an experiment that a device does not accept."""


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """One sentence that says that a name is unknown, with the nearest match and all that exist.

    >>> unknown("method", "flank", ["fedavg", "flanc"])
    "unknown method 'flank'; did you mean 'flanc'? Known: fedavg, flanc"
    """
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return f"unknown {kind} '{given}'{hint} Known: {', '.join(names) or 'none'}"


def told(error: BaseException) -> str:
    """An exception of the user's code in a line: its type, what it says, and the innermost line of the user's own.

    >>> told(ValueError("no such camera"))
    'ValueError: no such camera'
    """
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others = (str(Path(__file__).parent), *libraries, "<")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {reason(error)}{place}"


def reason(error: BaseException) -> str:
    """The first line of what an exception says, and the next one if the first ends in a colon.

    A worker's error has its traceback below.

    >>> reason(ValueError("wrong field 'size':\\n    must be a number\\n    given: 'many'"))
    "wrong field 'size': must be a number"
    """
    lines = [line.strip() for line in text_of(error).strip().split("\n") if line.strip()] or [""]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def first_of(problems: Sequence[str], most: int = 3) -> str:
    """The first of many problems in a line, and how many more there are.

    >>> first_of(["a is missing", "b is missing", "c is missing"], most=2)
    'a is missing; b is missing; and 1 more'
    """
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "; ".join([*problems[:most], *more])


def text_of(error: BaseException) -> str:
    """What an exception says; of one that cannot even be written, that it says nothing.

    >>> text_of(KeyError("layer"))
    "'layer'"
    """
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"


def in_flags(text: str) -> str:
    """An error's text in the words of the command line, where it names arguments of Python.

    >>> in_flags("go on with resume=True, or choose another folder with out=")
    'go on with --resume, or choose another folder with --out'
    """
    return re.sub(r"\b(?:(resume|overwrite|best)=True|(out)=(?=\W|$))", lambda found: f"--{found[1] or found[2]}", text)


def short(value: object) -> str:
    """A value from outside in one short line, without characters that a terminal would obey.

    >>> short("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    text = "".join(sign if sign.isprintable() else "?" for sign in repr(value)[:60])
    return f"{text[:57]}..." if len(text) == 60 else text
