"""What answers sub-models, wherever clients run: in this process, in a worker, on a Flower node, on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from torch import Tensor

from anysize.client.compression import compressed, restored
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
        sends: whether updates leave as they travel; by default they are restored, as the server will see them.
    """

    def __init__(
        self,
        context: Context,
        method: Method[Any],
        share: Callable[[int], Share],
        blamed: Blamed = lambda where: nullcontext(),
        sends: bool = False,
    ) -> None:
        self.context, self.method = context, method
        self._share, self._blamed, self._sends = share, blamed, sends

    @classmethod
    def of(cls, experiment: Experiment, share: Callable[[int], Share] | None = None, *, sends: bool = False) -> Self:
        """The service of an experiment that another process runs.

        Frees the full network's weights: clients do not use them.

        Args:
            experiment: as its brief describes it.
            share: returns a client's data; by default the experiment's.
            sends: whether updates leave as they travel.
        """
        context = experiment.context.for_client()
        experiment.forget_weights()
        return cls(context, experiment.method, share or experiment.shares.share, experiment.blamed, sends)

    def answer(self, sub_model: SubModel, kept: Mapping[str, Tensor] | None = None) -> Update:
        """The update of a client for a sub-model, or of a stack of clients for a stacked one.

        Args:
            sub_model: what the server sent.
            kept: tensors that stayed with this client at its last turn.
        """
        ticket = sub_model.ticket
        with one_thread(), self._blamed(f"round {ticket.round}, client {ticket.client}"):
            update = perform_any(self.context, self.method, sub_model, self._share, kept)
            chosen = self.context.communication
            if ticket.job != "train" or chosen.update == "float32":
                return update
            sent = compressed(chosen, update, sub_model, kept or {})
            return sent if self._sends else restored(chosen, sent, sub_model, update.tensors)
