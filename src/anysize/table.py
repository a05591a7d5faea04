"""The look-up table from a budget to a size: proxy accuracy and measured cost of everything a method could train.

The method finds the sizes, their masks and their accuracies (`Method.tabulate`). This module measures their costs and
keeps the table in a file, so that `anysize plan` and later runs need not compute it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from anysize.errors import CheckpointError, ConfigError
from anysize.wire import Json, dump, load, write

if TYPE_CHECKING:
    from anysize.context import Size
    from anysize.experiment import Experiment

_KIND = "look-up table"


@dataclass(frozen=True)
class Entry:
    """One size that could be trained.

    Attributes:
        size: the size, without a name.
        accuracy: the accuracy on the held-out part of the proxy data, after training on the rest.
        masks: for each pruned weight which entries stay, as packed bits; empty if the network is dense.
        cost: the cost in each unit of a budget.
    """

    size: Size
    accuracy: float
    masks: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    cost: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> Json:
        """The entry as JSON, without the masks."""
        about = asdict(self.size)
        del about["name"]
        return about | {"accuracy": self.accuracy, "cost": dict(self.cost)}


@dataclass(frozen=True)
class Table:
    """The sizes that could be trained, and how well they did on the proxy data."""

    entries: tuple[Entry, ...]

    @cached_property
    def best_first(self) -> list[Entry]:
        """The entries by proxy accuracy, the highest first; among equals, the one with fewer bytes first."""
        return sorted(self.entries, key=lambda e: (-e.accuracy, e.cost.get("bytes", 0.0), e.size.order))

    def entry(self, size: Size) -> Entry | None:
        """The entry of a size, whatever its name."""
        return next((entry for entry in self.entries if entry.size == replace(size, name="")), None)


def prepared(experiment: Experiment) -> Table | None:
    """The method's table with all costs: read from its file if that exists, else computed, and written if it has one.

    Raises:
        ConfigError: if the file holds the table of another experiment.
    """
    from anysize.engines.inprocess import one_thread

    named = experiment.config.method.options.get("table")
    path = (experiment.config.folder or Path()) / named if named else None
    if path is not None and path.is_file():
        return read(path, experiment)
    with one_thread():  # as in a run: the number of threads changes last bits
        found = experiment.method.tabulate(experiment.context_for((), None))
        if found is None:
            return None
        table = Table(tuple(replace(e, cost=_cost(experiment, found, e, path is not None)) for e in found.entries))
    if path is not None:
        save(path, table, fingerprint(experiment))
    return table


def _cost(experiment: Experiment, table: Table, entry: Entry, timed: bool) -> dict[str, float]:
    """The cost of an entry in every unit; time only if the table is kept in a file, since it varies between runs."""
    from anysize.cost import step_latency_ms
    from anysize.methods.base import Client

    context, method = experiment.context_for((entry.size,), table), experiment.method
    state = method.init(context)
    units = experiment.cost(entry.size, context, state).units()
    if not timed:
        return units
    message = method.extract(context, state, Client(0, 0, entry.size, 1, 1, context.seed))
    message = replace(message, ticket=message.ticket | {"task": "train", "rate": 0.1})
    return units | {"latency_ms": step_latency_ms(context, method, message, experiment.example)}


def fingerprint(experiment: Experiment) -> Json:
    """What a table depends on: of another experiment with the same values it is the same table."""
    config, data = experiment.complete, experiment.data
    return {
        "seed": config.seed,
        "data": None if data is None else data.checksum,
        "model": config.model.model_dump(mode="json"),
        "method": {key: value for key, value in config.method.options.items() if key not in _NO_MATTER},
        "training": config.training.model_dump(mode="json"),
        "tricks": asdict(experiment.tricks),
        "task": config.task.name,
    }


_NO_MATTER = ("table", "average", "fill")
"""Options of a method on which its table does not depend: the table's file, and what happens to updates."""


def _filled(noted: Json, experiment: Experiment) -> Json:
    """The fingerprint in a table's file; options that it lacks were left to the defaults."""
    options = experiment.defaults("method") | noted.get("method", {})
    model = noted.get("model", {})
    return noted | {
        "method": {key: value for key, value in options.items() if key not in _NO_MATTER},
        "model": model | {"options": experiment.defaults("model") | model.get("options", {})},
    }


def save(path: Path, table: Table, about: Json) -> None:
    """Write the table to a file."""
    tensors = {f"{i}/{name}": bits for i, entry in enumerate(table.entries) for name, bits in entry.masks.items()}
    rows = [entry.to_json() for entry in table.entries]
    if not path.parent.is_dir():
        raise ConfigError(f"method.table: the folder {path.parent} does not exist")
    write(path, dump(tensors, {"kind": _KIND, "entries": rows, "about": about}))


def read(path: Path, experiment: Experiment) -> Table:
    """The table in a file, refused if it is damaged or was made for another experiment."""
    from anysize.context import Size

    tensors, note = load(path.read_bytes(), str(path))
    if note.get("kind") != _KIND:
        raise CheckpointError(f"method.table: {path} holds no look-up table; name another file")
    about, noted = fingerprint(experiment), _filled(note["about"], experiment)
    other = [key for key in about if about[key] != noted.get(key)]
    if other:
        raise ConfigError(
            f"method.table: {path} was made for another experiment: {', '.join(other)} differ. Delete it to compute it "
            "again, or name another file"
        )
    made = []
    for place, row in enumerate(note["entries"]):
        prefix = f"{place}/"
        masks = {name.removeprefix(prefix): bits for name, bits in tensors.items() if name.startswith(prefix)}
        accuracy, cost = row.pop("accuracy"), row.pop("cost")
        made.append(Entry(Size(**row), accuracy, masks, cost))
    return Table(tuple(made))
