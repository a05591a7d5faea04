"""Tables of a run: exact values, and how to show each. The CSV has the exact values, the page the shown text."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from anysize.report.record import Cost, Number, Participation, Record, total

MISSING = "–"
NARROW_SPACE = "\N{NARROW NO-BREAK SPACE}"
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Column:
    """One column: its key in the CSV, its heading on the page, and how a value is shown there."""

    key: str
    heading: str
    show: Callable[[Any], str] = str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """Named rows of exact values; `sizes` gives each row's size, if it has one, for its colour."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    sizes: tuple[str | None, ...]

    @property
    def csv(self) -> str:
        """The exact values, with one line of keys."""
        return csv_text([column.key for column in self.columns], self.rows)


def csv_text(keys: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The rows as CSV: numbers with every digit, missing values empty, names that no program takes for a formula.

    >>> csv_text(["size", "accuracy"], [("0.25", 0.1 + 0.2), ("0.5", None), ("=1+1", 0.5)])
    "size,accuracy\\n0.25,0.30000000000000004\\n0.5,\\n'=1+1,0.5\\n"
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([*map(_cell, row)] for row in (keys, *rows))
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A cell; a text that begins like a formula gets the quote by which spreadsheets know a text."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def count(value: Number | None) -> str:
    """A count with three digits and a unit.

    >>> [count(n).replace(NARROW_SPACE, " ") for n in (33482, 999, 999_999, 1.5, None)]
    ['33.5 K', '999', '1.00 M', '1.5', '–']
    """
    return _scaled(value, ["", "K", "M", "G", "T", "P"])


def size_bytes(value: Number | None) -> str:
    """A number of bytes with three digits and a decimal unit.

    >>> [size_bytes(n).replace(NARROW_SPACE, " ") for n in (12, 1_234_567)]
    ['12 B', '1.23 MB']
    """
    return _scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"])


def decimals(values: Iterable[Number | None]) -> Callable[[Number | None], str]:
    """A function that shows these values with the same number of decimals: four for fractions, fewer if large.

    >>> show = decimals([0.95, 0.12345]); show(0.95), show(0.12345)
    ('0.9500', '0.1235')
    """
    largest = max((abs(value) for value in values if value is not None and isfinite(value)), default=0)
    places = 4 if largest < 10 else 3 if largest < 100 else 2 if largest < 1000 else 1
    return lambda value: MISSING if value is None else f"{value:.{places}f}"


def text(value: object) -> str:
    """The value as it is, or a dash if it is missing.

    >>> text("0.25"), text(None)
    ('0.25', '–')
    """
    return MISSING if value is None else str(value)


def duration(seconds: Number) -> str:
    """A time in the units that people use.

    >>> duration(41.04), duration(754), duration(7500)
    ('41.0 s', '12 min 34 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"


def times(number: int, noun: str) -> str:
    """A number of things, in the singular or plural.

    >>> times(1, "round"), times(30, "round")
    ('1 round', '30 rounds')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


COSTS = (
    Column("parameters", "parameters", count),
    Column("macs", "MACs", count),
    Column("training_macs", "training MACs", count),
    Column("activation_bytes", "activations", size_bytes),
    Column("bytes_down", "down", size_bytes),
    Column("bytes_up", "up", size_bytes),
)
COST_NOTE = (
    "MACs: multiply-accumulates of one forward pass; training MACs: of one training step; both per sample. "
    "Activations: memory of one training step. Down and up: bytes per client and round."
)


ON_CLIENTS = (
    "A size is judged by the clients that train it, each on samples of its own that it never trained on: the mean over "
    "them. Different sizes are judged on different samples."
)


def sizes(record: Record) -> Table:
    """One row per size: its metric and loss after the last evaluated round, and its cost."""
    start, latest = record.start, record.latest
    costs: Mapping[str, Cost] = {size.label: size for size in start.sizes}
    scores = [latest.scores.get(label) if latest else None for label in record.labels]
    losses = [latest.value(label, "loss") if latest else None for label in record.labels]
    columns = [Column("size", "size", text, numeric=False), Column(start.metric, start.metric, decimals(scores))]
    rows: list[Row] = [*zip(record.labels, scores)]
    if record.on_clients:
        spreads = [latest.spreads.get(label) if latest else None for label in record.labels]
        columns.append(Column("spread", "spread over clients", decimals(spreads)))
        rows = [(*row, spread) for row, spread in zip(rows, spreads)]
    if start.metric != "loss":
        columns.append(Column("loss", "loss", decimals(losses)))
        rows = [(*row, loss) for row, loss in zip(rows, losses)]
    columns += COSTS
    rows = [(*row, *_costs(costs.get(label, Cost()))) for row, label in zip(rows, record.labels)]
    better = "higher" if start.higher_is_better else "lower"
    measured = f"Measured after round {latest.round}; {better} {start.metric} is better. " if latest else ""
    told = f"{measured}{ON_CLIENTS} {COST_NOTE}" if record.on_clients else f"{measured}{COST_NOTE}"
    table = Table("sizes", told, tuple(columns), tuple(rows), tuple(record.labels))
    return _without_empty(table, ["loss"]) if record.on_clients else table


def groups(record: Record) -> Table | None:
    """One row per device group: what it trained, what that costs one client, and how often it took part.

    A device group that took part but is not in the start event has a row too, so that the counts add up.
    """
    announced = {group.name: group for group in record.start.groups}
    taken = [part for round_ in record.rounds for part in round_.clients]
    names = record.by_size([*announced, *(part.group for part in taken if part.group is not None)])
    if not names:
        return None
    rows, row_sizes = [], []
    for name in names:
        group = announced.get(name)
        parts = [part for part in taken if part.group == name]
        rows.append(
            (
                name,
                _trained(group.size if group else None, parts),
                group.clients if group else None,
                group.capacity if group else None,
                json.dumps(group.budget) if group and group.budget else None,
                *_costs(group or Cost()),
                len(parts),
                total(part.samples for part in parts),
            )
        )
        row_sizes.append(group.size if group else None)
    columns = (
        Column("group", "device group", text, numeric=False),
        Column("size", "trained size", text, numeric=False),
        Column("clients", "clients", text),
        Column("capacity", "capacity", text),
        Column("budget", "budget", budget, numeric=False),
        *COSTS,
        Column("participations", "took part", text),
        Column("samples", "samples", count),
    )
    caption = (
        "Costs are of one client, as above. Took part: how often a client of the group did, over "
        f"{times(len(record.rounds), 'round')}. Samples: how many they trained on, summed over the rounds."
    )
    return _without_empty(Table("groups", caption, columns, tuple(rows), tuple(row_sizes)), ["capacity", "budget"])


def client_metrics(record: Record) -> Table | None:
    """One row per device group: the metric on its clients' own held-out samples, as last measured."""
    measured = [round_ for round_ in record.rounds if round_.client_metrics]
    if not measured:
        return None
    latest, metric = measured[-1], record.start.metric
    trained = {group.name: group.size for group in record.start.groups}
    scores = latest.client_metrics
    show = decimals(value for score in scores.values() for value in (score.mean, score.worst_decile, score.spread))
    columns = (
        Column("group", "device group", text, numeric=False),
        Column("clients", "clients", text),
        Column("mean", f"mean {metric}", show),
        Column("worst_decile", "worst decile", show),
        Column("spread", "spread", show),
    )
    ordered = record.by_size(scores)
    rows = tuple(
        (name, own.clients, own.mean, own.worst_decile, own.spread) for name in ordered if (own := scores[name])
    )
    caption = (
        f"Measured after round {latest.round}, by each client on samples that it never trained on. "
        "Mean, worst decile and spread are over the clients of the device group."
    )
    return Table("client-metrics", caption, columns, rows, tuple(trained.get(name) for name in ordered))


def devices(record: Record) -> Table | None:
    """One row per real device: its name, how often it took part, and how good the model was there at last."""
    if not record.devices:
        return None
    metric, scores = record.start.metric, record.last_scores
    taken = Counter(str(part.client) for round_ in record.rounds for part in round_.clients)
    absent = Counter(str(part.client) for round_ in record.rounds for part in round_.missing)
    trained = {group.name: group.size for group in record.start.groups}
    columns = (
        Column("device", "device", text, numeric=False),
        Column("group", "group", text, numeric=False),
        Column(metric, metric, decimals(score.score for score in scores.values())),
        *([Column("loss", "loss", decimals(score.loss for score in scores.values()))] if metric != "loss" else []),
        Column("round", "judged after round", text),
        Column("samples", "held-out samples", text),
        Column("took_part", "took part", text),
        Column("missing", "missing", text),
        Column("client", "client", text),
    )
    rows = []
    for client, device in record.devices.items():
        score = scores.get(client)
        values = (None,) * 4 if score is None else (score.score, score.loss, score.round, score.samples)
        judged = values if metric != "loss" else (values[0], *values[2:])
        rows.append((device.name, device.group, *judged, taken[client], absent[client], client))
    caption = (
        f"What each device found when it was last asked, on samples of its own that it never trained on. Took part: in "
        f"how many of {times(len(record.rounds), 'round')} its update counted. Missing: answers that did not come."
    )
    row_sizes = tuple(trained.get(device.group or "") for device in record.devices.values())
    return _without_empty(Table("devices", caption, columns, tuple(rows), row_sizes), ["samples", "loss"])


def missing(record: Record) -> Table | None:
    """One row per missing or refused answer: the round, the client, and the reason."""
    late = [(round_, absence) for round_ in record.rounds for absence in round_.missing]
    if not late:
        return None
    columns = (
        Column("round", "round", text),
        Column("client", "client", text),
        Column("device", "device", text, numeric=False),
        Column("task", "asked to", text, numeric=False),
        Column("why", "why", text, numeric=False),
        Column("void", "round changed nothing", lambda value: "yes" if value else ""),
    )
    names = {client: device.name for client, device in record.devices.items()}
    rows = tuple(
        (round_.round, absence.client, names.get(str(absence.client)), absence.task, absence.why, round_.void)
        for round_, absence in late
    )
    often = Counter(str(absence.client) for _, absence in late).most_common(10)
    rounds = len({round_.round for round_, _ in late})
    caption = (
        f"{times(len(late), 'answer')} missing or refused, in {rounds} of {times(len(record.rounds), 'round')}; most "
        f"often from {', '.join(f'{record.called(client)} ({number}×)' for client, number in often)}. "
        f"{sum(round_.void for round_ in record.rounds)} of the rounds changed nothing, since too few clients answered."
    )
    return _without_empty(Table("missing", caption, columns, rows, (None,) * len(rows)), ["device"])


def profile(record: Record) -> Table | None:
    """One row per stage: the seconds that all profiled rounds spent in it, and their share."""
    rounds = [round_.profile for round_ in record.rounds if round_.profile]
    if not rounds:
        return None
    stages = list(dict.fromkeys(name for spent in rounds for name in spent))
    totals = {name: sum(spent.get(name, 0.0) for spent in rounds) for name in stages}
    whole = sum(totals.values()) or 1.0
    columns = (
        Column("stage", "stage", text, numeric=False),
        Column("seconds", "seconds", decimals(totals.values())),
        Column("seconds_per_round", "a round", decimals(totals.values())),
        Column("share", "share", lambda value: f"{value:.1%}"),
    )
    rows = tuple((name, spent, spent / len(rounds), spent / whole) for name, spent in totals.items())
    caption = (
        f"Over {times(len(rounds), 'profiled round')}, on the server's clock. Train: waiting for clients' updates. "
        "Checkpoint: writing the checkpoint from which a round began. Time counts for the innermost stage."
    )
    return Table("profile", caption, columns, rows, (None,) * len(rows))


def budget(value: str | None) -> str:
    """A budget, given as JSON, as readable text.

    >>> budget('{"activation_bytes": 64000000}').replace(NARROW_SPACE, " ")
    'activations ≤ 64.0 MB'
    """
    if value is None:
        return MISSING
    limits = json.loads(value)
    headings = {column.key: column.heading for column in COSTS}
    return ", ".join(
        f"{headings.get(key, key)} ≤ {size_bytes(limit) if 'bytes' in key else count(limit)}"
        for key, limit in limits.items()
        if limit is not None
    )


def _scaled(value: Number | None, units: Sequence[str]) -> str:
    """Three digits, and the first unit in which the number is below a thousand."""
    if value is None:
        return MISSING
    if not isfinite(value):
        return str(value)
    if abs(value) < 1000:
        return f"{value:g}{NARROW_SPACE}{units[0]}".rstrip(NARROW_SPACE)
    power = 1
    while power < len(units) - 1 and abs(value) >= 999.5 * 1000**power:
        power += 1
    scaled = value / 1000**power
    places = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{places}f}{NARROW_SPACE}{units[power]}"


def _costs(cost: Cost) -> Row:
    return tuple(getattr(cost, column.key) for column in COSTS)


def _trained(announced: str | None, parts: Sequence[Participation]) -> str | None:
    """The size that a device group trained; with counts if its devices trained several sizes."""
    seen = Counter(part.size for part in parts if part.size is not None)
    if set(seen) <= {announced}:
        return announced
    if len(seen) == 1:
        return next(iter(seen))
    return ", ".join(f"{size} ({times}×)" for size, times in sorted(seen.items()))


def _without_empty(table: Table, keys: Sequence[str]) -> Table:
    """The table without those named columns that are empty in every row."""
    kept = [
        index
        for index, column in enumerate(table.columns)
        if column.key not in keys or any(row[index] is not None for row in table.rows)
    ]
    return Table(
        table.name,
        table.caption,
        tuple(table.columns[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in table.rows),
        table.sizes,
    )
