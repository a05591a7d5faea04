"""Updates that moved too far, cut back towards what was sent: the rule "norm-clip", for every method.

An update is what a client sent back less what it was sent, over all tensors of its message that are not whole numbers.
Its norm is compared with those of clients of the same size alone, so that no method need say how its sub-models fit
together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from anysize.methods.messages import Update
from anysize.methods.steps import clipped, norm_of, step_of
from anysize.wire import Tensors, copies


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
            yield replace(update, tensors=clipped(sent[update.ticket.client], update.tensors, most))
        return
    held = [replace(update, tensors=copies(update.tensors)) for update in updates]
    norms: dict[str, list[float]] = {}
    for update in held:
        norms.setdefault(update.label, []).append(norm_of(step_of(sent[update.ticket.client], update.tensors)))
    bounds = {label: statistics.median(own) for label, own in norms.items()}
    for update in held:
        tensors = clipped(sent[update.ticket.client], update.tensors, bounds[update.label])
        yield replace(update, tensors=tensors)
