"""Sums over the clients of one class in place of single updates, where `aggregation.secure_threshold` asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from anysize.engines.base import Absence
from anysize.errors import AnysizeError
from anysize.methods.context import Context
from anysize.methods.messages import SubModel, Update
from anysize.methods.sums import CLIENTS, ClassSum, class_of
from anysize.wire import Json


class Summing:
    """One round's sums. An engine of real devices answers with means already; a simulation's updates are summed here.

    A simulation has no masks, since they would cancel to the last bit: what is left is the rounding to fixed point.

    Args:
        context: the server's.
    """

    def __init__(self, context: Context) -> None:
        self._tricks, self._threshold = context.tricks, context.aggregation.secure_threshold
        self._class: dict[int, str] = {}
        self._message: dict[str, SubModel] = {}

    def noted(self, sub_models: Iterator[SubModel]) -> Iterator[SubModel]:
        """The sub-models, as they are sent."""
        for sub_model in sub_models:
            if self._threshold is not None:
                kind = self._class[sub_model.ticket.client] = class_of(sub_model)
                self._message.setdefault(kind, sub_model)
            yield sub_model
            del sub_model

    def summed(self, updates: Iterator[Update], missing: list[Json]) -> Iterator[Update]:
        """The updates as they come; or the mean of each class, if secure aggregation was chosen.

        Args:
            updates: those of a simulation, or means that an engine made.
            missing: takes the clients of classes that have too few.
        """
        sums: dict[str, ClassSum] = {}
        for update in updates:
            if self._threshold is None or update.members:
                yield update
                del update
                continue
            kind = self._class[update.ticket.client]
            own = sums.setdefault(kind, ClassSum.of(self._message[kind], update))
            own.add(update, self._tricks)
        for own in sums.values():
            if len(own.members) > CLIENTS:
                raise AnysizeError(
                    f"{len(own.members)} clients of one size in a round; a secure sum can have {CLIENTS}"
                )
            if len(own.members) >= (self._threshold or 0):
                yield own.mean(self._tricks)
                continue
            why = f"{len(own.members)} clients of its size took part, and a sum that hides each needs {self._threshold}"
            missing.extend(asdict(Absence(client, why)) for client in own.members)
