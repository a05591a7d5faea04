"""Making, measuring and keeping the look-up table of a method that searches before the first round."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from anysize.atomic import write
from anysize.client.process import one_thread
from anysize.cost.latency import step_latency_ms
from anysize.errors import CheckpointError, ConfigError
from anysize.experiment.setup import Setup
from anysize.methods.capabilities import Searched
from anysize.methods.messages import Client
from anysize.methods.size import Size
from anysize.methods.table import Entry, Table
from anysize.wire import Json, dump, load

_KIND = "look-up table"


def prepared(setup: Setup) -> Table | None:
    """The method's table with all costs: read from its file if that exists, else computed, and written if it has one.

    Raises:
        ConfigError: if the file holds the table of another experiment.
    """
    named = setup.config.method.options.get("table")
    path = (setup.config.folder or Path()) / named if named else None
    if path is not None and path.is_file():
        return read(path, setup)
    with one_thread():  # as in a run: the number of threads changes last bits
        method = setup.method
        found = method.tabulate(setup.context_for((), None)) if isinstance(method, Searched) else None
        if found is None:
            return None
        table = Table(tuple(replace(e, cost=_cost(setup, found, e, path is not None)) for e in found.entries))
    if path is not None:
        save(path, table, fingerprint(setup))
    return table


def _cost(setup: Setup, table: Table, entry: Entry, timed: bool) -> dict[str, float]:
    """The cost of an entry in every unit; time only if the table is kept in a file, since it varies between runs."""
    context, method = setup.context_for((entry.size,), table), setup.method
    state = method.init(context)
    units = setup.cost_in(context, entry.size, state).units()
    if not timed:
        return units
    message = method.extract(context, state, Client(0, 0, entry.size, 1, 1, context.seed))
    message = replace(message, ticket=message.ticket | {"task": "train", "rate": 0.1})
    return units | {"latency_ms": step_latency_ms(context, method, message, setup.example)}


def fingerprint(setup: Setup) -> Json:
    """What a table depends on: of another experiment with the same values it is the same table."""
    config, data = setup.complete, setup.data
    return {
        "seed": config.seed,
        "data": None if data is None else data.checksum,
        "model": config.model.model_dump(mode="json"),
        "method": {key: value for key, value in config.method.options.items() if key not in _NO_MATTER},
        "training": config.training.model_dump(mode="json"),
        "tricks": asdict(setup.tricks),
        "task": config.task.name,
    }


_NO_MATTER = ("table", "average", "fill")
"""Options of a method on which its table does not depend: the table's file, and what happens to updates."""


def _filled(noted: Json, setup: Setup) -> Json:
    """The fingerprint in a table's file; options that it lacks were left to the defaults."""
    options = setup.defaults("method") | noted.get("method", {})
    model = noted.get("model", {})
    return noted | {
        "method": {key: value for key, value in options.items() if key not in _NO_MATTER},
        "model": model | {"options": setup.defaults("model") | model.get("options", {})},
    }


def save(path: Path, table: Table, about: Json) -> None:
    """Write the table to a file."""
    tensors = {f"{i}/{name}": bits for i, entry in enumerate(table.entries) for name, bits in entry.masks.items()}
    rows = [entry.to_json() for entry in table.entries]
    if not path.parent.is_dir():
        raise ConfigError(f"method.table: the folder {path.parent} does not exist")
    content = dump(tensors, {"kind": _KIND, "entries": rows, "about": about})
    write(path, content, ConfigError, "name another file in method.table")


def read(path: Path, setup: Setup) -> Table:
    """The table in a file, refused if it is damaged or was made for another experiment."""
    tensors, note = load(path.read_bytes(), f"method.table: {path}", CheckpointError)
    if note.get("kind") != _KIND:
        raise CheckpointError(f"method.table: {path} holds no look-up table; name another file")
    about, noted = fingerprint(setup), _filled(note["about"], setup)
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
