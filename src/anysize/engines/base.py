"""The seam between a round and the place where its clients run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from anysize.client.shards import Evaluation
from anysize.devices.fleet import Fleet
from anysize.methods.messages import SubModel, Update
from anysize.tasks import Sums


@dataclass(frozen=True)
class Absence:
    """In place of an update: the client raised, was too late, sent what it should not have, or disappeared.

    Attributes:
        client: which client.
        why: in plain words, for the report: "too late", "sent weight 3.bias of shape (8,), expected (4,)".
    """

    client: int
    why: str


def present(answers: Iterable[Update | Absence], missing: list[Absence]) -> Iterator[Update]:
    """The updates among the answers, in order; the absences are put into `missing`.

    >>> missing = []
    >>> update = Update({}, Ticket(client=0, round=1, seed=0, size="1.0", width=1.0))
    >>> [answer.ticket.client for answer in present([update, Absence(1, "too late")], missing)]
    [0]
    >>> missing
    [Absence(client=1, why='too late')]
    """
    for answer in answers:
        if isinstance(answer, Absence):
            missing.append(answer)
        else:
            yield answer


class Engine(ABC):
    """Runs clients' jobs; a context manager, since some engines have workers to stop."""

    @abstractmethod
    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
        """The answer to each sub-model, in the order given. Each is drawn only when there is room to run it.

        On a fleet an answer may be an absence, which costs the client's own update and nothing else. In a simulation
        every client answers, and its errors are raised.

        The tensors of a training update may live in memory that the engine uses again: they are good until the next
        update is drawn. Who needs them longer copies them.
        """

    def fleet(self, round: int, planned: Fleet) -> Fleet:
        """Who is there in a round; by default whom the experiment plans with.

        An engine of real devices says with `anysize.devices.fleet.enrolled` which they are, and what each can train.
        """
        return planned

    def evaluate(self, evaluation: Evaluation) -> Iterator[Sums]:
        """The sums of each shard, in the order given; in this process, unless the engine has others for it."""
        return evaluation.here()

    def close(self) -> None:  # noqa: B027 - an engine without workers has nothing to stop
        """Stops whatever the engine started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
