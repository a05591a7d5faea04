"""An engine that gives another engine stacks of clients instead of single clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from anysize.client.shards import Evaluation
from anysize.client.stacking import parts_of, stacks
from anysize.devices.fleet import Fleet
from anysize.engines.base import Absence, Engine
from anysize.methods.messages import SubModel, Update
from anysize.tasks import Sums


class Stacked(Engine):
    """Stacks neighbouring clients of equal shape, lets an engine run the stacks, and splits the answers.

    Args:
        engine: runs a stack as it runs a sub-model.
        limit: the most clients in a stack.
        samples: how many samples a client trains on.
    """

    def __init__(self, engine: Engine, limit: int, samples: Callable[[int], int]) -> None:
        self._engine = engine
        self._limit = limit
        self._samples = samples

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
        for answer in self._engine.perform(stacks(sub_models, self._limit, self._samples)):
            if isinstance(answer, Absence):
                yield answer
            else:
                yield from parts_of(answer)

    def fleet(self, round: int, planned: Fleet) -> Fleet:
        """Who is there, as the engine below says."""
        return self._engine.fleet(round, planned)

    def evaluate(self, evaluation: Evaluation) -> Iterator[Sums]:
        """The sums of each shard, by the engine below."""
        return self._engine.evaluate(evaluation)

    def close(self) -> None:
        """Closes the engine below."""
        self._engine.close()
