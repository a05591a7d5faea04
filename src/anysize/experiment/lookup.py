"""The look-up table of a method that searches before the first round: computed, measured and saved."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anysize.atomic import write
from anysize.client.process import one_thread
from anysize.config.tables import DataConfig
from anysize.cost.latency import step_latency_ms
from anysize.data import Data
from anysize.elastic.skeleton import hollow
from anysize.elastic.tracing.forward import without_data
from anysize.errors import CheckpointError, ConfigError, short
from anysize.experiment.setup import Setup
from anysize.methods.capabilities import Searched
from anysize.methods.messages import Client, is_number
from anysize.methods.size import Size
from anysize.methods.table import Entry, Table
from anysize.wire import Json, Tensors, opened, sealed, under

_KIND = "look-up table"


def prepared(setup: Setup) -> Table | None:
    """The method's look-up table with all costs: read from its file if that exists, else computed and saved.

    Raises:
        ConfigError: if the file holds the table of another experiment.
    """
    named = setup.config.method.options.get("table")
    path = (setup.config.folder or Path()) / named if named else None
    if path is not None and path.is_file():
        return read(path, setup)
    with one_thread():  # as in a run: the number of threads changes the last bits
        method = setup.method
        found = method.tabulate(setup.context_for((), None)) if isinstance(method, Searched) else None
        if found is None:
            return None
        costed = (replace(e, cost=_cost(setup, found, e, path is not None)) for e in found.entries)
        table = replace(found, entries=tuple(costed))
    if path is not None:
        save(path, table, fingerprint(setup))
    return table


def _cost(setup: Setup, table: Table, entry: Entry, timed: bool) -> dict[str, float]:
    """The cost of an entry in every unit; time only if the table is saved, since it varies between runs."""
    context, method = setup.context_for((entry.size,), table), setup.method
    state = method.init(context)
    units = setup.cost_in(context, entry.size, state).units()
    if not timed:
        return units
    message = method.extract(context, state, Client(0, 0, entry.size, 1, 1, context.seed))
    message = replace(message, ticket=replace(message.ticket, rate=0.1))
    return units | {"latency_ms": step_latency_ms(context, method, message, setup.example)}


def fingerprint(setup: Setup) -> Json:
    """What a table depends on: of another experiment with the same values it is the same table.

    What the devices do later does not count: how long they train, and how their updates are averaged. Where the data
    stays on the devices, "data" is None.
    """
    config, data = setup.complete, setup.data
    context = setup.context_for(())
    training, tricks = config.training.model_dump(mode="json"), asdict(setup.tricks)
    return {
        "seed": config.seed,
        "data": None if data is None else _data(data, config.data),
        "augment": list(config.data.augment),
        "model": structure(context.template, setup.signature.example(2)),
        "start": _magnitudes(context.start()),
        "method": {key: value for key, value in config.method.options.items() if key not in _NO_MATTER["method"]},
        "training": {key: value for key, value in training.items() if key not in _NO_MATTER["training"]},
        "tricks": {key: value for key, value in tricks.items() if key not in _NO_MATTER["tricks"]},
        "task": config.task.name,
    }


def step_timed(setup: Setup) -> Json:
    """What the time of a training step depends on, besides the size and the machine."""
    checksum = structure(setup.context_for(()).template, setup.signature.example(2))
    return {
        "method": setup.config.method.name,
        "network": checksum[:_CHECKSUM],
        "batch_size": setup.config.training.batch_size,
    }


_CHECKSUM = 16  # characters that tell networks apart
_NO_MATTER = {
    "method": ("table", "average", "fill"),
    "training": (
        "local_epochs",
        "local_steps",
        "stack",
        "schedule",
        "milestones",
        "gamma",
        "final_learning_rate",
    ),
    "tricks": ("weighting", "classwise_head", "server_momentum", "rescaled_init"),
}
"""Options on which a table does not depend: its file, the length of a round, and what happens to updates."""


def _data(data: Data, config: DataConfig) -> Json:
    """The data set, and which part of it is in use."""
    part = {"fraction": config.fraction, "split": config.split} if config.fraction < 1 else {}
    return {"checksum": data.checksum, **part}


def structure(network: nn.Module, example: Tensor) -> str:
    """What a network computes: a checksum of its modules and of the operations of one forward, without any weights.

    Two networks whose tensors have equal names and shapes differ here if one of their operations does.
    """
    bare = hollow(network, constants=False).eval()
    with without_data(), torch.no_grad(), _Operations() as seen:
        bare(example.to("meta"))
    modules = [f"{path} {type(part).__name__}({part.extra_repr()})" for path, part in bare.named_modules()]
    return hashlib.sha256("\n".join([*modules, *seen.lines]).encode()).hexdigest()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes every operation with its arguments: numbers as they are, tensors in the order they came."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self._known: dict[int, tuple[int, Tensor]] = {}  # holds the tensors, so that no id is given twice

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if name not in ("device", "pin_memory")}
        made = function(*args, **(kwargs or {}))
        self.lines.append(f"{function} {self._named(args)} {self._named(given)} -> {self._named(made)}")
        return made

    def _named(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            number, _ = self._known.setdefault(id(value), (len(self._known), value))
            return f"tensor {number} {tuple(value.shape)} {value.dtype}"
        if isinstance(value, list | tuple):
            return [self._named(part) for part in value]
        if isinstance(value, dict):
            return {name: self._named(part) for name, part in value.items()}
        return value if isinstance(value, int | float | str | None) else str(value)


def _magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The mean magnitude of each tensor: what tells one start from another, whatever machine drew it."""
    return {name: float(t.double().abs().mean()) for name, t in tensors.items() if t.is_floating_point() and t.numel()}


def differences(noted: Json, about: Json) -> list[str]:
    """In which parts a table's fingerprint is another than an experiment's; data that is not here is not compared."""
    other = [key for key in about if key not in ("start", "data") and about[key] != noted.get(key)]
    if about["data"] is not None and about["data"] != noted.get("data"):
        other.append("data")
    before, now = noted.get("start") or {}, about["start"]
    near = before.keys() == now.keys() and all(
        math.isclose(before[name], now[name], rel_tol=_ROUNDING, abs_tol=_ROUNDING) for name in now
    )
    return other if near or "model" in other else [*other, "start"]


_ROUNDING = 1e-5  # machines may differ in the last bits of what they draw


def _filled(noted: Json, setup: Setup) -> Json:
    """The fingerprint in a table's file; options of the method that it lacks were left to the defaults."""
    options = setup.defaults("method") | noted.get("method", {})
    return noted | {"method": {key: value for key, value in options.items() if key not in _NO_MATTER["method"]}}


def save(path: Path, table: Table, about: Json) -> None:
    """Write the table to a file."""
    tensors = {f"{i}/{name}": bits for i, entry in enumerate(table.entries) for name, bits in entry.masks.items()}
    rows = [entry.to_json() for entry in table.entries]
    if not path.parent.is_dir():
        raise ConfigError(f"method.table: the folder {path.parent} does not exist")
    samples = {"trained": table.trained, "judged": table.judged}
    content = sealed(tensors, {"kind": _KIND, "entries": rows, "about": about, "samples": samples})
    write(path, content, ConfigError, "name another file in method.table")


def read(path: Path, setup: Setup) -> Table:
    """The table in a file; an error if it is damaged or was made for another experiment."""
    tensors, note = opened(path.read_bytes(), f"method.table: {path}", CheckpointError)
    if note.get("kind") != _KIND:
        raise CheckpointError(f"method.table: {path} holds no look-up table; name another file")
    try:
        other = differences(_filled(note["about"], setup), fingerprint(setup))
        table = _table(tensors, note)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"method.table: {path} is damaged ({type(error).__name__}: {error}); delete it to compute it again, or "
            "restore an intact copy of it"
        ) from None
    if other:
        remedy = "Delete it to compute it again, or name another file"
        if setup.data is None:
            remedy = (
                "Make it again where the data is, with these settings; there set data.normalize = false, unless the "
                "network here normalises its inputs too"
            )
        raise ConfigError(f"method.table: {path} was made for another experiment: {', '.join(other)} differ. {remedy}")
    return table


def _table(tensors: Tensors, note: Json) -> Table:
    """The table of a file's contents; an error if something is missing, too much or out of range."""
    made = tuple(_entry(row, under(f"{place}/", tensors)) for place, row in enumerate(note["entries"]))
    held = sum(len(entry.masks) for entry in made)
    _demand(bool(made) and held == len(tensors), "it holds masks of no size")
    samples = note.get("samples", {"trained": 0, "judged": 0})  # files of older versions have none
    _demand(set(samples) == {"trained", "judged"}, f"its samples are {short(samples)}")
    table = Table(made, **samples)
    _demand(all(type(n) is int and n >= 0 for n in (table.trained, table.judged)), "its samples are not counted")
    return table


def _entry(row: Json, masks: Tensors) -> Entry:
    about = dict(row)
    accuracy, cost = about.pop("accuracy"), about.pop("cost")
    size = Size(**about)
    numbers = [size.width, size.mask, accuracy, *cost.values(), *([] if size.robustness is None else [size.robustness])]
    _demand(all(map(is_number, numbers)), f"{short(row)} has a value that is not a number")
    depth = size.depth is None or (type(size.depth) is int and size.depth > 0)
    _demand(0 < size.width <= 1 and 0 <= size.mask < 1 and depth and not size.name, f"{short(about)} is not a size")
    _demand(all(number >= 0 for number in cost.values()), f"{short(cost)} are not costs")
    _demand(all(bits.dtype == torch.uint8 for bits in masks.values()), "a mask is not of bits")
    return Entry(size, accuracy, masks, cost)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
