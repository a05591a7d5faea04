"""The server's guard: it checks what devices send before anything uses it.

The server knows what it asked for. An answer must have the names, shapes and types that an untrained network of the
same message packs, numbers that are finite and within bounds, and nothing else. Facts about the message come from
the ticket that was sent, not from the one that came back. An invalid answer becomes an `Absence`: the client's update
is lost. The guard cannot check whether an answer is true: a device can lie within the bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from anysize.client.compression import problems as wire_problems
from anysize.client.compression import restored, sent_forms
from anysize.config.tables import EngineConfig
from anysize.cost.count import answered, on_meta
from anysize.deploy.affordable import REMEMBERED, finished_network, kind_of, statistics_form, without_statistics
from anysize.elastic.norm import batch_norms
from anysize.engines.base import Absence
from anysize.errors import TrustError, short
from anysize.experiment.experiment import Experiment, example_sums
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.kit import finite
from anysize.methods.messages import ANSWERS, SubModel, Ticket, Update, is_number
from anysize.methods.sums import Words, count_words, mean_of
from anysize.wire import Tensors

_SHOWN = 3  # problems of an answer that the error lists


_LARGEST = {"mean": 1e15, "variance": 1e30, "count": 1e15}
"""The largest statistics of a batch-norm: their squares and sums stay finite in single precision."""


@dataclass(frozen=True)
class Form:
    """What an answer must look like.

    Attributes:
        tensors: the shape and type of each tensor, by name.
        kinds: for the tensors that are statistics, which kind: "mean", "variance", "count".
        keys: what the method adds to the ticket.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    kinds: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()


def form(context: Context, method: Method[Any], sub_model: SubModel) -> Form:
    """The form of the answer to a message, from building and packing an untrained network on the meta device."""
    job = sub_model.ticket.job
    if job == "evaluate":
        return Form({})
    meta = on_meta(replace(sub_model, tensors=without_statistics(sub_model.tensors)))
    if job == "calibrate":
        shapes = statistics_form(finished_network(context, method, meta))
        return Form(shapes, {name: name.rpartition(".")[2] for name in shapes})
    module, answer = answered(context, method, meta)
    tensors = answer.tensors
    storages = {_storage(buffer): "count" if not buffer.is_floating_point() else "mean" for buffer in module.buffers()}
    storages |= {_storage(n.running_var): "variance" for n in batch_norms(module) if n.running_var is not None}
    kinds = {name: storages[_storage(t)] for name, t in tensors.items() if _storage(t) in storages}
    added = frozenset(answer.ticket.more) - frozenset(meta.ticket.more)
    return Form({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}, kinds, added)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Guard:
    """The server's guard: `guard(sub_model, tensors, note)` is the update, or an absence.

    Args:
        context: the server's.
        method: the method.
        options: the bounds.
        sums: the names of the sums of the task's metrics.
    """

    def __init__(self, context: Context, method: Method[Any], options: EngineConfig, sums: Collection[str]) -> None:
        self._context = context.for_client()
        self._method = method
        self._options = options
        self._sums = frozenset(sums)
        self._forms: dict[str, Form] = {}

    @classmethod
    def of(cls, experiment: Experiment) -> Guard:
        """The guard of an experiment."""
        options = experiment.config.engine
        return cls(experiment.context, experiment.method, options, example_sums(experiment))

    def __call__(self, sub_model: SubModel, tensors: Tensors, note: Any) -> Update | Absence:
        """The update if it is what the message asked for, else an absence that says what is wrong.

        Args:
            sub_model: what was sent.
            tensors: the answer's tensors.
            note: the answer's note; `Update.to_json`, if the client is honest.
        """
        client, expected = sub_model.ticket.client, self.form(sub_model)
        try:
            update = Update.from_json(tensors, note)
        except TrustError as error:
            return Absence(client, f"sent a wrong ticket: {error}")
        wrong = _listed(self._wire_problems(sub_model, update, expected))
        if wrong is None:
            update = self._restored(sub_model, update, expected)
            wrong = _listed(
                (_number_problems(update.tensors, expected), self._norm_problems(sub_model, update, expected))
            )
        if wrong is not None:
            return Absence(client, wrong)
        said = {key: value for key, value in update.ticket.more.items() if key in expected.keys}
        return replace(update, ticket=replace(sub_model.ticket, more={**sub_model.ticket.more, **said}))

    def mean(self, sub_model: SubModel, words: Words, members: Sequence[int]) -> Update | Absence:
        """The mean of several devices from their secure sum, if it is one that honest devices can have.

        Args:
            sub_model: what one of them was sent.
            words: the sum of their words.
            members: the clients in the sum.
        """
        expected, client = self.form(sub_model), sub_model.ticket.client
        if len(words) != count_words(_empty(expected)):
            return Absence(client, f"its size sent {len(words)} words, expected {count_words(_empty(expected))}")
        tricks, most = self._context.tricks, self._options.max_samples
        update = mean_of(words, sub_model, _empty(expected), members, tricks, most)
        # What rounding to fixed point leaves below zero is zero.
        above = [name for name, kind in expected.kinds.items() if kind in ("variance", "count")]
        rounded = {name: update.tensors[name].clamp_min(0) for name in above if update.tensors[name].min() > -1e-6}
        update = replace(update, tensors=update.tensors | rounded)
        wrong = _listed((_number_problems(update.tensors, expected), self._norm_problems(sub_model, update, expected)))
        return update if wrong is None else Absence(client, f"the mean of its size is refused: {wrong}")

    def _wire_problems(self, sub_model: SubModel, update: Update, expected: Form) -> Iterator[Iterator[str]]:
        """The problems of an answer as it travelled; each kind relies on those before it."""
        travels = self._travels(sub_model, expected)
        yield self._ticket_problems(sub_model.ticket, update, expected)
        yield _form_problems(update.tensors, travels)
        yield _number_problems(update.tensors, travels)
        if sub_model.ticket.job == "train":
            yield wire_problems(self._context.communication, update.tensors, _empty(expected))

    def _travels(self, sub_model: SubModel, expected: Form) -> Form:
        """The form in which an answer travels."""
        if sub_model.ticket.job != "train":
            return expected
        forms = sent_forms(self._context.communication, _empty(expected))
        return replace(expected, tensors={name: (tuple(t.shape), t.dtype) for name, t in forms.items()})

    def _restored(self, sub_model: SubModel, update: Update, expected: Form) -> Update:
        """The answer with its weights."""
        if sub_model.ticket.job != "train":
            return update
        return restored(self._context.communication, update, sub_model, _empty(expected))

    def form(self, sub_model: SubModel) -> Form:
        """The form of the answer to a message; found once for all messages of one kind."""
        kind = kind_of(sub_model)
        if kind not in self._forms:
            if len(self._forms) == REMEMBERED:
                self._forms.clear()
            self._forms[kind] = form(self._context, self._method, sub_model)
        return self._forms[kind]

    def _ticket_problems(self, sent: Ticket, update: Update, expected: Form) -> Iterator[str]:
        """Differences between an answer's ticket and the sent one, and facts that it must not tell."""
        asked, came = sent.to_json(), update.ticket.to_json()
        for key, value in asked.items():
            if key not in came:
                yield f"sent a ticket without {key}"
            elif not _same(came[key], value):
                yield f"sent a ticket with {key} = {short(came[key])}, expected {short(value)}"
        for key in sorted(set(came) - set(asked) - expected.keys):
            yield f"sent a ticket with {short(key)}, which nobody asked for"
        checks = {"samples": self._samples, "loss": _loss, "classes": self._classes, "sums": self._metrics}
        for key in ANSWERS[sent.job]:
            yield from checks[key](getattr(update, key))

    def _samples(self, samples: Any) -> Iterator[str]:
        most = self._options.max_samples
        if "samples" not in self._context.tells:
            if samples is not None:
                yield "sent its number of samples, which nobody may ask for (devices.share)"
        elif type(samples) is not int or not 0 < samples <= most:
            yield f"sent samples = {short(samples)}, expected a whole number from 1 to {most} (engine.max_samples)"

    def _classes(self, classes: Any) -> Iterator[str]:
        known = self._context.classes
        wanted = self._context.tricks.classwise_head and "labels" in self._context.tells and known is not None
        if not wanted:
            if classes is not None:
                yield "sent which classes it has, which nobody may ask for (devices.share)"
        elif not isinstance(classes, list) or len(classes) != known or not _bits(classes):
            yield f"sent classes = {short(classes)}, expected a 0 or 1 for each of the {known} classes, and a 1"

    def _metrics(self, sums: Any) -> Iterator[str]:
        if not isinstance(sums, dict) or set(sums) != self._sums:
            yield f"sent sums {short(sums)}, expected {', '.join(sorted(self._sums))}"
            return
        wrong = [f"{key} = {short(value)}" for key, value in sums.items() if not is_number(value)]
        count = sums.get("count")
        if wrong or (count is not None and not 0 < count <= 1e15):
            yield f"sent sums with {', '.join(wrong) or f'count = {short(count)}'}, expected finite numbers"
        elif count is not None and not 0 <= sums.get("correct", 0) <= count:
            yield f"sent {sums['correct']:g} correct answers of {count:g}"
        elif not self._judgeable(sums):
            yield f"sent sums {short(sums)}, from which no metrics follow"

    def _judgeable(self, sums: dict[str, float]) -> bool:
        """Whether the task's metrics of these sums are numbers; the task may be the user's code."""
        try:
            return all(is_number(value) for value in self._context.task.metrics(sums).values())
        except (ArithmeticError, ValueError, TypeError, KeyError):
            return False

    def _norm_problems(self, sub_model: SubModel, update: Update, expected: Form) -> Iterator[str]:
        """Whether the parameters moved further than allowed from the sent ones."""
        moved = still = 0.0
        for name, tensor in update.tensors.items():
            if name in expected.kinds:
                continue
            before = sub_model.tensors.get(name)
            if before is not None and before.shape == tensor.shape:
                still += _norm(before) ** 2
                tensor = tensor.to(torch.float64) - before.to(torch.float64)
            moved += _norm(tensor) ** 2
        allowed = self._options.update_norm * (1 + math.sqrt(still))
        if math.sqrt(moved) > allowed:
            yield (
                f"sent parameters that moved by {math.sqrt(moved):.3g}, expected at most {allowed:.3g} "
                "(engine.update_norm)"
            )


def _listed(kinds: Iterable[Iterator[str]]) -> str | None:
    """The first problems of the first kind that has any; None if there are none."""
    found = next((found for found in map(list, kinds) if found), None)
    if found is None:
        return None
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _empty(expected: Form) -> Tensors:
    """Tensors of a form, on the meta device."""
    return {name: torch.empty(shape, dtype=kind, device="meta") for name, (shape, kind) in expected.tensors.items()}


def _form_problems(tensors: Mapping[str, Tensor], expected: Form) -> Iterator[str]:
    """Unexpected names, shapes and types."""
    for name in expected.tensors:
        if name not in tensors:
            yield f"sent no weight {name}"
    for name, tensor in tensors.items():
        if name not in expected.tensors:
            yield f"sent weight {short(name)}, which it was not given"
            continue
        shape, kind = expected.tensors[name]
        if tuple(tensor.shape) != shape:
            yield f"sent weight {name} of shape {tuple(tensor.shape)}, expected {shape}"
        elif tensor.dtype != kind:
            yield f"sent weight {name} of type {_type(tensor.dtype)}, expected {_type(kind)}"


def _number_problems(tensors: Mapping[str, Tensor], expected: Form) -> Iterator[str]:
    """Numbers that are not finite, and statistics that no data can have."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()) or not finite(tensor):
            yield f"sent weight {name} with numbers that are not finite"
            continue
        kind = expected.kinds.get(name)
        if kind is None or not tensor.numel():
            continue
        low, high = float(tensor.min()), float(tensor.max())
        lowest = -_LARGEST[kind] if kind == "mean" else 0.0
        if not lowest <= low <= high <= _LARGEST[kind]:
            yield f"sent statistics {name} from {low:.3g} to {high:.3g}, expected {lowest:.3g} to {_LARGEST[kind]:.3g}"


def _loss(loss: Any) -> Iterator[str]:
    if not is_number(loss):
        yield f"sent loss = {short(loss)}, expected a finite number"


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.to(torch.float64)))


def _same(one: object, other: object) -> bool:
    """Whether two JSON values are equal; unlike in Python, true is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _bits(values: list[Any]) -> bool:
    return all(type(value) is int and value in (0, 1) for value in values) and 1 in values


def _type(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
