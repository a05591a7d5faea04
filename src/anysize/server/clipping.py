"""Updates that moved too far, cut back towards what was sent or left out: the rules "norm-clip" and "norm-filter".

An update is what a client sent back less what it was sent, over all tensors of its message that are not whole numbers.
Only its norm counts, so that no method need say how its sub-models fit together.

norm-clip compares it with those of clients of the same size. A size has few clients in a round, so that attackers are
easily half of them, and the bound is theirs. norm-filter compares it with those of all clients of the round, and leaves
out what is far longer: clients that train the same number of steps move about as far, whatever their size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from anysize.engines.base import Absence
from anysize.methods.messages import Update
from anysize.methods.steps import clipped, norm_of, step_of
from anysize.wire import Tensors, copies

FAR = 2.0
"""norm-filter: an update so many times as long as the bound is left out."""


def norm_clipped(updates: Iterable[Update], sent: Mapping[int, Tensors], most: float | None) -> Iterator[Update]:
    """The updates, none longer than `most`; without it, than the median of those of its size in the round.

    With a given bound they stream; a median needs all of them, which are held.

    Args:
        updates: in order.
        sent: what each client was sent, by its id; complete when its update comes.
        most: the largest norm.
    """
    if most is not None:
        for update in updates:
            yield _cut(update, sent, most)
        return
    held = _held(updates)
    norms: dict[str, list[float]] = {}
    for update in held:
        norms.setdefault(update.label, []).append(_norm(update, sent))
    bounds = {label: _middle(statistics.median, own) for label, own in norms.items()}
    for update in held:
        yield _cut(update, sent, bounds[update.label])


def norm_filtered(
    updates: Iterable[Update], sent: Mapping[int, Tensors], most: float | None, on_far: Callable[[Absence], None]
) -> Iterator[Update]:
    """The updates, none longer than `most`, without those that are more than `FAR` times as long.

    Without `most`, the bound is the median norm of all updates, whatever their size; of an even number, the lower of
    the two in the middle. So it is that of an honest client, or below one's, if no more than half of them are longer
    than they should be.

    Args:
        updates: in order.
        sent: what each client was sent, by its id; complete when its update comes.
        most: the largest norm.
        on_far: takes who is left out, and why.
    """
    if most is None:
        updates = _held(updates)
        most = _middle(statistics.median_low, [_norm(update, sent) for update in updates])
    for update in updates:
        norm = _norm(update, sent)
        if norm > FAR * most:
            times = f"{norm / most:.3g} times as far as" if most else "further than"
            on_far(Absence(update.ticket.client, f"left out: its update moved {times} the round's bound"))
        else:
            yield _cut(update, sent, most)


def _held(updates: Iterable[Update]) -> list[Update]:
    return [replace(update, tensors=copies(update.tensors)) for update in updates]


def _middle(median: Callable[[list[float]], float], norms: list[float]) -> float:
    """The median of the norms that are finite; an update with another is refused later, by the name of its client."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return median(finite) if finite else 0.0


def _norm(update: Update, sent: Mapping[int, Tensors]) -> float:
    return norm_of(step_of(sent[update.ticket.client], update.tensors))


def _cut(update: Update, sent: Mapping[int, Tensors], most: float) -> Update:
    return replace(update, tensors=clipped(sent[update.ticket.client], update.tensors, most))
