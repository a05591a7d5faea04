"""A device's introduction before it takes part, and its words made safe to print."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from anysize.devices.budget import Budget
from anysize.errors import AnysizeError
from anysize.wire import Json

_LONGEST = 300  # characters of a device's words that are shown
_INVISIBLE = r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]+"
_MEASURED = ("latency_ms", "memory_bytes")  # by the labels of sizes


@dataclass(frozen=True)
class Introduction:
    """What a device tells about itself.

    Attributes:
        name: the device's name.
        capacity: the fraction of the full model that it can train, or None with a budget.
        budget: what it can afford in units, or None with a capacity.
        latency_ms: how long a training step of sizes took on it, by their labels; empty if it did not measure that.
        memory_bytes: how much memory the training of sizes took on it, likewise; infinite of a size that ran out of it.

    >>> Introduction.of(Introduction("cam", 0.25).to_note())
    Introduction(name='cam', capacity=0.25, budget=None)
    """

    name: str
    capacity: float | None = None
    budget: Budget | None = None
    latency_ms: Mapping[str, float] = field(default_factory=dict, repr=False)
    memory_bytes: Mapping[str, float] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, note: Json) -> Introduction:
        """The introduction in a note; an error if it is not valid."""
        if "failure" in note:
            raise AnysizeError(f"says: {plain(note['failure'])}")
        about = note.get("device")
        if not isinstance(about, dict) or not isinstance(about.get("name"), str) or not about["name"]:
            raise AnysizeError("did not say its name")
        if about["name"] != plain(about["name"]):
            raise AnysizeError(f"calls itself {plain(about['name'])!r}, which is not a short plain name")
        capacity, budget = about.get("capacity"), about.get("budget")
        if (capacity is None) == (budget is None):
            raise AnysizeError("must tell either a capacity or a budget")
        if capacity is not None and not (is_number(capacity) and 0 < capacity <= 1):
            raise AnysizeError(f"has capacity {plain(capacity)}; it must be above 0 and at most 1")
        try:
            limits = None if budget is None else Budget(**budget)
        except TypeError:
            raise AnysizeError(f"has a budget in unknown units: {plain(budget)}") from None
        return cls(about["name"], capacity, limits, *(_measured(about.get(unit) or {}, unit) for unit in _MEASURED))

    def to_note(self) -> Json:
        """The introduction as a note; `of` is the inverse."""
        budget = None if self.budget is None else self.budget.limits()
        measured = {
            unit: {label: one if math.isfinite(one) else None for label, one in told.items()}
            for unit in _MEASURED
            if (told := getattr(self, unit))
        }
        return {"device": {"name": self.name, "capacity": self.capacity, "budget": budget, **measured}}

    def can(self) -> str:
        """What it can train, in words.

        >>> Introduction("cam", budget=Budget(macs=1e6)).can()
        'what fits macs = 1e+06'
        """
        if self.budget is None:
            return f"capacity {self.capacity:g}"
        return "what fits " + ", ".join(f"{unit} = {limit:g}" for unit, limit in self.budget.limits().items())


def _measured(told: object, unit: str) -> dict[str, float]:
    """What a device measured of its sizes, by their labels, null being infinite; an error if it is no such thing."""
    if not isinstance(told, dict) or not all(one is None or _amount(one) for one in told.values()):
        raise AnysizeError(f"tells {unit} that are no numbers above 0: {plain(told)}")
    return {str(label): math.inf if one is None else float(one) for label, one in told.items()}


def _amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def plain(said: object) -> str:
    """A device's words as one short line without control characters, or others that change how a line is read.

    >>> plain("no\\x1b[31m memory\\nTraceback ...")
    'no [31m memory Traceback ...'
    >>> plain("cam\\u202egnp.exe")
    'cam gnp.exe'
    """
    text = said if isinstance(said, str) else json.dumps(said, default=str)
    line = re.sub(_INVISIBLE, " ", text)
    if not line.strip():
        return "(no words)"
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
