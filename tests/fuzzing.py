"""Changed files and messages, and the property that all of them must have.

Whatever comes in is refused with an error that names it, or accepted with the meaning that it states. Any other
exception fails, and so does a case that takes more than 200 MB of memory or, among many cases, 2 seconds.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anysize import onnx_runtime, runtime
from anysize.errors import AnysizeError

T = TypeVar("T")
FEW, MANY = 50, 10_000
MEMORY, SECONDS = 200_000_000, 2.0
_EACH = 50  # changes for a seed
REFUSALS = (AnysizeError, runtime.BundleError, onnx_runtime.BundleError)  # devices copy the runtimes alone

cases = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
"""The test runs with few cases and, in the slow suite, with many."""


def every(count: int, change: Callable[[Random], T], holds: Callable[[T], object]) -> None:
    """Try that many changes, the same ones every time; `holds` raises for a change that lacks the property.

    Of few changes hypothesis draws every choice, and makes one that fails smaller. Of many it draws seeds, each for
    several changes: its own work takes longer than most cases. What they took is printed (`pytest -rP`).
    """
    each = 1 if count == FEW else _EACH
    slowest, most = 0.0, 0

    @settings(
        max_examples=count // each,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=each > 1))
    def tried(dice: Random) -> None:
        nonlocal slowest, most
        with bounded() as memory:
            for _ in range(each):
                slowest = max(slowest, _seconds(change(dice), holds))
        assert each == 1 or slowest <= SECONDS, f"a case took {slowest:.1f} s of processor time"
        most = max(most, *memory)

    tried()
    print(f"{count} cases: the slowest took {slowest:.2f} s, the most memory {most / 1e6:.0f} MB")


def _seconds(made: T, holds: Callable[[T], object]) -> float:
    """The processor time of a case; an error tells what it was."""
    began = time.process_time()
    try:
        holds(made)
    except BaseException as error:
        error.add_note(f"the change: {made!r:.3000}")
        raise
    return time.process_time() - began


def refused(name: object, read: Callable[[], T], or_key: str = "\n") -> T | None:
    """What `read` returns; None if it refuses with an error that gives the name, or begins a line with the key."""
    said = ""
    try:
        return read()
    except REFUSALS as error:
        said = f"{type(error).__name__}: {error}"
    assert str(name) in said or f" {or_key}" in said, f"it does not name {name}: {said}"
    return None


@contextmanager
def bounded() -> Iterator[list[int]]:
    """Fail if the block takes too much memory; yields a list that gets how much it took."""
    before, took = _resident(peak=False), [0]
    yield took
    took[0] = _resident(peak=True) - before
    assert took[0] <= MEMORY, f"took {took[0] / 1e6:.0f} MB"


def _resident(peak: bool) -> int:
    """The bytes that the process has in memory: now, after which a new peak counts, or at the peak; 0 if unknown."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM" if peak else "VmRSS"))
    return 1024 * int(line.split()[1])


# Bytes ----------------------------------------------------------------------------------------------


def broken(dice: Random, content: bytes) -> bytes:
    """Content with flipped bits, a part missing, twice or elsewhere, other bytes, or another length in front."""
    kind = dice.choice(["flip", "flip", "cut", "drop", "twice", "insert", "swap", "length", "zero"])
    length = len(content)
    first, second = sorted((dice.randint(0, length), dice.randint(0, length)))
    match kind:
        case "flip":
            changed = bytearray(content)
            for _ in range(dice.choice([1, 1, 4])):
                changed[dice.randint(0, length - 1)] ^= 1 << dice.randint(0, 7)
            return bytes(changed)
        case "cut":
            return content[:first]
        case "drop":
            return content[:first] + content[second:]
        case "twice":
            return content[:second] + content[first:]
        case "insert":
            return content[:first] + dice.randbytes(dice.randint(1, 9)) + content[first:]
        case "swap":
            return content[second:] + content[first:second] + content[:first]
        case "length":
            number = dice.choice([0, 1, 7, 8, 9, length - 8, length, 1 << 31, 1 << 60, (1 << 64) - 1])
            return number.to_bytes(8, "little") + content[8:]
    return content[:first] + bytes(second - first) + content[second:]


# Trees: JSON and TOML -------------------------------------------------------------------------------


class Twice(dict[str, Any]):
    """An object of which `written` writes one key a second time, with another value."""

    def __init__(self, own: dict[str, Any], key: str, value: Any) -> None:
        super().__init__(own)
        self.second = key, value


@dataclass(frozen=True)
class Nested:
    """Lists in a list, deeper than Python would copy them."""

    depth: int


ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 7, 1 << 31, 1 << 63, -(1 << 70), 10**400, 0.5, -1.5, 5e-324, 1e308),
    *(
        math.nan,
        math.inf,
        -math.inf,
        "",
        "x",
        "0.5",
        "nan",
        "1e3",
        "../x",
        "/etc/passwd",
        "٣",
        "\u2028",
        "\x00",
        "é" * 40,
        "\ud800",
    ),
    *([], [1], [[0, 1]], [-1], [1 << 40], [0, 1 << 62], [None], {}, {"a": 1}, {"": {}}, Nested(60), Nested(100_000)),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree but the root."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(*path, key) for key, _ in inner]
    return [*found, *(deeper for place in found for deeper in places(_at(value, place[len(path) :]), place))]


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def altered(dice: Random, tree: Any, odd: tuple[Any, ...] = ()) -> Any:
    """A tree in which one to three places have odd or near values, are gone, twice, renamed or exchanged."""
    found = copy.deepcopy(tree)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        where = places(found)
        if where:
            *way, last = dice.choice(where)
            _alter(dice, found, _at(found, tuple(way)), tuple(way), last, [*ODD, *odd])
    return found


def _alter(dice: Random, tree: Any, parent: Any, way: tuple[Any, ...], last: Any, odd: list[Any]) -> None:
    value = parent[last]
    kind = dice.choice(["odd", "odd", "odd", "near", "near", "drop", "more", "swap", "again"])
    if kind == "near" and isinstance(value, int | float):
        parent[last] = dice.choice([value + 1, value - 1, -value, 2 * value, str(value), bool(value)])
    elif kind == "near" and isinstance(value, str):
        parent[last] = dice.choice([f"{value} ", value.upper(), value[1:], f"{value}\x00", [value]])
    elif kind == "drop":
        del parent[last]
    elif kind == "more" and isinstance(parent, dict):
        parent[dice.choice([f"{last}2", "", "ключ", "__metadata__", "\x00"])] = copy.deepcopy(value)
    elif kind == "more":
        parent.insert(last, copy.deepcopy(value))
    elif kind == "swap":
        other = dice.choice(sorted(parent) if isinstance(parent, dict) else list(range(len(parent))))
        parent[last], parent[other] = parent[other], parent[last]
    elif kind == "again" and isinstance(parent, dict) and way:
        *above, name = way
        _at(tree, tuple(above))[name] = Twice(parent, last, dice.choice(odd))
    else:
        parent[last] = copy.deepcopy(dice.choice(odd))


def written(tree: Any) -> str:
    """A tree as JSON, with what Python's own writer allows beyond it: NaN, infinity, and keys that come twice."""
    if isinstance(tree, dict):
        pairs = [*tree.items(), *([tree.second] if isinstance(tree, Twice) else [])]
        return "{" + ",".join(f"{json.dumps(str(key))}:{written(value)}" for key, value in pairs) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(map(written, tree)) + "]"
    return "[" * tree.depth + "]" * tree.depth if isinstance(tree, Nested) else json.dumps(tree)


def strict(text: str | bytes, infinite: bool = False) -> Any:
    """The value of a JSON text; a ValueError if a key comes twice, a number is none that JSON has, or text is none.

    Args:
        text: the text.
        infinite: whether infinity counts as a number, as in the note of a bundle, which may also hold any whole one.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key comes twice")
        return dict(pairs)

    def never(name: str) -> Any:
        if infinite and name != "NaN":
            return float(name)
        raise ValueError(f"{name} is no number of JSON")

    found = json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=once, parse_constant=never)
    if not infinite and not sound(found):
        raise ValueError("a number that no float holds, or half a character")
    return found


def sound(value: Any) -> bool:
    """Whether every whole number fits a float, and every text can be written."""
    if isinstance(value, dict):
        return all(sound(key) and sound(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(sound, value))
    if isinstance(value, str):
        return not any("\ud800" <= sign <= "\udfff" for sign in value)
    return not isinstance(value, int) or abs(value) <= sys.float_info.max


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal and of the same types all through; 1 and 1.0 are, 1 and True are not."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return left == right or (left != left and right != right)


# Files of tensors -----------------------------------------------------------------------------------

Parts = tuple[dict[str, Any], Any, bytes]
"""Of a safetensors file: what its header says of the tensors, its note, and the bytes of the tensors."""


def parts_of(content: bytes) -> Parts:
    """The parts of a file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = strict(content[8:end])
    note = strict(header.pop("__metadata__")["anysize"], infinite=True)
    return header, note, content[end:]


def joined(header: Any, note: Any, data: bytes) -> bytes:
    """A file of these parts."""
    text = written({"__metadata__": {"anysize": written(note)}, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "F99")


def rewritten(dice: Random, content: bytes, sealed: Callable[[Any, Any, bytes], bytes] = joined) -> bytes:
    """A file with another header or note, or with other numbers; `sealed` makes it whole again."""
    header, note, data = parts_of(content)
    kind = dice.choice(["note", "note", "header", "data"])
    if kind == "note":
        note = altered(dice, {"note": note})
        return sealed(header, note.get("note"), data)
    if kind == "header":
        changed = altered(dice, {"header": header}, odd=DTYPES).get("header")
        return sealed(changed if isinstance(changed, dict) else {"": changed}, note, data)
    return sealed(header, note, broken(dice, data) if data else b"\x00")


def damaged(dice: Random, content: bytes) -> bytes:
    """A file changed by its structure, or byte by byte."""
    return dice.choice([rewritten, broken])(dice, content)
