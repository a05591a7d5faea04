"""Clients one after another in this process, with one thread: the reference that every other engine must equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anysize.data import Shares
from anysize.engines.base import Engine
from anysize.engines.service import ClientService
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import SubModel, Update
from anysize.profiling import measuring
from anysize.wire import Tensors


class InProcess(Engine):
    """Runs each client here.

    Args:
        context: the server's; clients get it without what only the server may hold.
        method: the method.
        shares: each client's data.
        kept: the tensors that stay with each client, by its id.
    """

    def __init__(self, context: Context, method: Method[Any], shares: Shares, kept: Mapping[int, Tensors]) -> None:
        self._service = ClientService(context.for_client(), method, shares.share)
        self._kept = kept

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update]:
        for sub_model in sub_models:
            with measuring(None):  # a client's time counts as one stage, as with workers
                update = self._service.answer(sub_model, self._kept.get(sub_model.ticket.client))
            yield update
