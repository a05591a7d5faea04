"""The seam between a round and the place where its clients run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType

from anysize.exams import Examination
from anysize.methods.base import SubModel, Update
from anysize.tasks import Sums


class Engine(ABC):
    """Runs client tasks; a context manager, since some engines have workers to stop."""

    @abstractmethod
    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update]:
        """The update of each sub-model, in the order given. Each is drawn only when there is room to run it.

        The tensors of a training update may live in memory that the engine uses again: they are good until the next
        update is drawn. Who needs them longer copies them.
        """

    def examine(self, examination: Examination) -> Iterator[Sums]:
        """The sums of each exam, in the order given; in this process, unless the engine has others for it."""
        return examination.here()

    def close(self) -> None:  # noqa: B027 - an engine without workers has nothing to stop
        """Stops whatever the engine started."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
