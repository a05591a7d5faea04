"""What both doors of a fleet need: values of strangers, checked and shown."""

from __future__ import annotations


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def short(value: object) -> str:
    """A value of a stranger's in one short line, without signs that a terminal would obey."""
    text = "".join(sign if sign.isprintable() else "?" for sign in repr(value)[:60])
    return f"{text[:57]}..." if len(text) == 60 else text
