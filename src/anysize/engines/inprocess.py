"""Clients one after another in this process, with one thread: the reference that every other engine must equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anysize.client.process import one_thread
from anysize.client.stacking import perform_any
from anysize.data import Shares
from anysize.engines.base import Engine
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import SubModel, Update
from anysize.profiling import measuring
from anysize.wire import Tensors


class InProcess(Engine):
    """Runs each client here.

    Args:
        context: the server's; clients see it without what only the server may hold.
        method: the method.
        shares: each client's data.
        kept: what stayed with each client, by its id.
    """

    def __init__(self, context: Context, method: Method[Any], shares: Shares, kept: Mapping[int, Tensors]) -> None:
        self._context = context.for_client()
        self._method = method
        self._shares = shares
        self._kept = kept

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update]:
        for sub_model in sub_models:
            client = int(sub_model.ticket["client"])
            with one_thread(), measuring(None):  # a client's time is all one stage, as with workers
                update = perform_any(self._context, self._method, sub_model, self._shares, self._kept.get(client))
            yield update
