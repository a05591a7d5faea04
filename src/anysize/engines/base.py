"""The interface between a round and the place where its clients run."""

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
    """Takes the place of an update: the client raised, was too late, sent something invalid, or disappeared.

    Attributes:
        client: which client.
        why: in plain words, for the report: "too late", "sent weight 3.bias of shape (8,), expected (4,)".
    """

    client: int
    why: str


def present(answers: Iterable[Update | Absence], missing: list[Absence]) -> Iterator[Update]:
    """The updates among the answers, in order; adds the absences to `missing`.

    >>> missing = []
    >>> from anysize.methods.messages import Ticket
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
    """Runs the jobs of clients; a context manager, since some engines have workers to stop."""

    @abstractmethod
    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update | Absence]:
        """The answer to each sub-model, in the order given. Each is drawn only when there is room to run it.

        On a fleet an answer may be an absence: only that client's update is lost. In a simulation every client answers,
        and its errors are raised.

        The tensors of a training update may be in memory that the engine reuses: they are valid until the next update
        is drawn. Copy them to use them longer.
        """

    def fleet(self, round: int, planned: Fleet) -> Fleet:
        """The fleet of a round; by default the one of the experiment's plan.

        An engine of real devices makes it with `anysize.devices.fleet.enrolled`: the connected devices and their sizes.
        """
        return planned

    def evaluate(self, evaluation: Evaluation) -> Iterator[Sums]:
        """The sums of each shard, in the order given; measured in this process, unless the engine has workers."""
        return evaluation.here()

    def close(self) -> None:  # noqa: B027 - an engine without workers has nothing to stop
        """Stop everything that the engine started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
