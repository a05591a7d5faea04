"""What answers sub-models, wherever clients run: in this process, in a worker, on a Flower node, on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from torch import Tensor

from anysize.client.process import one_thread
from anysize.client.stacking import perform_any
from anysize.data import Share
from anysize.experiment.experiment import Experiment
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import SubModel, Update

Blamed = Callable[[str], AbstractContextManager[None]]


class ClientService:
    """Does the jobs of an experiment's clients, with one thread: the same bits come out in every process.

    Args:
        context: the clients'.
        method: the method.
        share: returns a client's data.
        blamed: names the user's code in errors that it causes (see `Setup.blamed`).
    """

    def __init__(
        self,
        context: Context,
        method: Method[Any],
        share: Callable[[int], Share],
        blamed: Blamed = lambda where: nullcontext(),
    ) -> None:
        self.context, self.method = context, method
        self._share, self._blamed = share, blamed

    @classmethod
    def of(cls, experiment: Experiment, share: Callable[[int], Share] | None = None) -> Self:
        """The service of an experiment that another process runs.

        Frees the full network's weights: clients do not use them.

        Args:
            experiment: as its brief describes it.
            share: returns a client's data; by default the experiment's.
        """
        context = experiment.context.for_client()
        experiment.forget_weights()
        return cls(context, experiment.method, share or experiment.shares.share, experiment.blamed)

    def answer(self, sub_model: SubModel, kept: Mapping[str, Tensor] | None = None) -> Update:
        """The update of a client for a sub-model, or of a stack of clients for a stacked one.

        Args:
            sub_model: what the server sent.
            kept: tensors that stayed with this client at its last turn.
        """
        ticket = sub_model.ticket
        with one_thread(), self._blamed(f"round {ticket.round}, client {ticket.client}"):
            return perform_any(self.context, self.method, sub_model, self._share, kept)
