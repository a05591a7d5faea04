"""Sizes that the code of a network computes from other sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anysize.elastic.tracing.classes import Planes


@dataclass(frozen=True, eq=False)
class Extent:
    """The size of one axis of a labelled tensor; `stop` counts only the first `stop` positions."""

    planes: Planes
    axis: int
    size: int
    stop: int | None = None

    def lanes(self) -> list[Tensor]:
        """The labels along the axis, one row per plane, cut at `stop`."""
        rows = [plane.movedim(self.axis, 0).reshape(plane.shape[self.axis], -1)[:, 0] for plane in self.planes]
        return [row.expand(self.size)[: self.stop] for row in rows]


@dataclass(frozen=True)
class Attribute:
    """An integer stored on a module, by dotted path."""

    path: str


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """An operation on two expressions."""

    apply: Callable[[int, int], int]
    left: Expression
    right: Expression


Expression = int | Extent | Attribute | Arithmetic


def evaluate(expression: Expression, attributes: Mapping[str, int], extent: Callable[[Extent], int]) -> int | None:
    """The value of an expression at the given attribute values and sizes; None if it has no value there."""
    if isinstance(expression, int):
        return int(expression)
    if isinstance(expression, Attribute):
        return attributes[expression.path]
    if isinstance(expression, Extent):
        return extent(expression)
    left = evaluate(expression.left, attributes, extent)
    right = evaluate(expression.right, attributes, extent)
    if left is None or right is None:
        return None
    try:
        return expression.apply(left, right)
    except ZeroDivisionError:
        return None


def attributes_in(expression: Expression) -> frozenset[str]:
    """The attribute paths an expression depends on."""
    if isinstance(expression, Attribute):
        return frozenset((expression.path,))
    if isinstance(expression, Arithmetic):
        return attributes_in(expression.left) | attributes_in(expression.right)
    return frozenset()


def has_extent(expression: Expression) -> bool:
    """Whether an expression depends on the size of an axis of units."""
    if isinstance(expression, Arithmetic):
        return has_extent(expression.left) or has_extent(expression.right)
    return isinstance(expression, Extent)


class TracedInt(int):
    """An int that behaves like any other and remembers the expression that made it."""

    expression: Expression

    def __new__(cls, value: int, expression: Expression) -> TracedInt:
        made = super().__new__(cls, value)
        made.expression = expression
        return made

    def __add__(self, other: Any) -> Any:
        return _arithmetic(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _arithmetic(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return _arithmetic(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return _arithmetic(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return _arithmetic(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _arithmetic(operator.mul, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _arithmetic(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _arithmetic(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return _arithmetic(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return _arithmetic(operator.mod, other, self)

    def __eq__(self, other: Any) -> bool:
        equal = int.__eq__(self, other)
        if equal is not NotImplemented and isinstance(other, TracedInt):
            _note_compared(self.expression, other.expression, equal)
        return equal

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedInt:
        return self


@dataclass(frozen=True)
class Unequal:
    """Code compared two attributes and found them different, as a block with and without a projection does."""

    left: str
    right: str


Listener = Callable[["SizeNote | Unequal"], None]
_listeners: list[Listener] = []


@contextmanager
def compared(listen: Listener) -> Iterator[None]:
    """Inside, `listen` hears of each size that equals an attribute where code asks, and of unequal attributes."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


def _note_compared(left: Expression, right: Expression, equal: bool) -> None:
    for listen in _listeners:
        for own, wanted in ((left, right), (right, left)) if equal else ():
            if isinstance(own, Extent) and isinstance(wanted, Attribute):
                listen(SizeNote(wanted, own))
        if not equal and isinstance(left, Attribute) and isinstance(right, Attribute):
            listen(Unequal(left.path, right.path))


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, TracedInt) else value


def _expression(value: int) -> Expression:
    return value.expression if isinstance(value, TracedInt) else value


def _arithmetic(apply: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    value = apply(_plain(left), _plain(right))
    integers = isinstance(left, int) and isinstance(right, int)
    if not integers or not isinstance(value, int):
        return value
    return TracedInt(value, Arithmetic(apply, _expression(left), _expression(right)))


@dataclass(frozen=True, eq=False)
class SizeNote:
    """The forward used `expression` as the size `extent`: both must agree in a narrowed network too."""

    expression: Expression
    extent: Extent
