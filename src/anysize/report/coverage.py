"""Who trained what: how much of the model each domain's and each client's data ever reached, and what it cost.

A method names the parts of its model (base networks, or what each width adds to the one before), and a round's event
says which parts each participant trained. A part counts once for a domain, no matter how often or by how many of its
clients it was trained, as in Split-Mix's Figs. 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, pstdev

from anysize.report.charts import ACCENT, Axis, Bars, Box, Boxes, Figure, Look, Series, capital, colour, finite, look
from anysize.report.figures import MANY_CLIENTS
from anysize.report.record import Cost, Number, Participation, Record
from anysize.report.tables import Column, Row, Table, count, decimals, text

MANY_DOMAINS = 40  # with more, bars would be too thin to tell apart


def build(record: Record) -> list[Figure]:
    """The figures for which there are numbers."""
    figures = (scores_by_domain(record), trained_by_domain(record), trained_by_client(record))
    return [figure for figure in figures if figure is not None]


def trained_parts(record: Record, whose: Callable[[Participation], str | None]) -> dict[str, set[str]]:
    """For each name (of a client, domain or device group) the parts ever trained there, in order of appearance."""
    found: dict[str, set[str]] = {}
    for part in _taken(record):
        name = whose(part)
        if name is not None:
            found.setdefault(name, set()).update(part.parts)
    return found


def share(record: Record, names: set[str]) -> tuple[Number, float]:
    """How many parameters these parts have, and their share of all parameters."""
    trained = sum(record.start.parts.get(name, 0) for name in names)
    return trained, trained / sum(record.start.parts.values())


def trained_by_domain(record: Record) -> Figure | None:
    """The share of the model that the clients of each domain ever trained (Split-Mix, Fig. 6)."""
    found = trained_parts(record, lambda part: part.domain)
    if not found or not any(record.start.parts.values()):
        return None
    rows = tuple((domain, _clients(record, domain), *share(record, found[domain])) for domain in sorted(found))
    return _bars(
        "trained-by-domain",
        "What the clients of each domain trained",
        f"Parameters that at least one client of the domain trained in {len(record.rounds)} rounds, of all that the "
        "method has.",
        ("domain", "clients", "parameters", "share"),
        rows,
        [("", ACCENT, {row[0]: row[3] for row in rows})],
        Axis("share of all parameters", show=_percent, from_zero=True),
    )


def scores_by_domain(record: Record) -> Figure | None:
    """The metric of every size on the test samples of each domain, after the last evaluated round."""
    latest, metric = record.latest, record.start.metric
    if latest is None:
        return None
    prefix = f"{metric}/"
    rows = tuple(
        (latest.round, name.removeprefix(prefix), label, finite(value))
        for label in record.labels
        for name, value in latest.metrics.get(label, {}).items()
        if name.startswith(prefix)
    )
    if not rows:
        return None
    bars = [
        (label, look(record, label), {row[1]: row[3] for row in rows if row[2] == label}) for label in record.labels
    ]
    title, caption = f"{capital(metric)} by domain", f"On each domain's test samples, after round {latest.round}."
    keys = ("round", "domain", "size", metric)
    return _bars("by-domain", title, caption, keys, rows, bars, Axis(metric, exact=decimals(row[3] for row in rows)))


def trained_by_client(record: Record) -> Figure | None:
    """The share of the model that each client ever trained, by device group."""
    found = trained_parts(record, lambda part: str(part.client))
    if not any(found.values()) or not any(record.start.parts.values()):
        return None
    turns: dict[str, list[Participation]] = {}
    for part in _taken(record):
        turns.setdefault(str(part.client), []).append(part)
    rows = tuple(
        (
            name,
            turns[name][-1].group,
            turns[name][-1].domain,
            len(turns[name]),
            *share(record, parts),
            fmean(share(record, set(turn.parts))[1] for turn in turns[name]),
        )
        for name, parts in sorted(found.items(), key=lambda item: (len(item[0]), item[0]))
    )
    trained = {group.name: group.size for group in record.start.groups}
    boxes = []
    for group in record.by_size(row[1] or "" for row in rows):
        own = [row for row in rows if (row[1] or "") == group]
        names = tuple(record.called(row[0]) for row in own)
        boxes.append(Box(group or "clients", tuple(row[5] for row in own), names, colour(record, trained.get(group))))
    share_axis = Axis("share of all parameters", show=_percent, from_zero=True)
    return Figure(
        name="trained-by-client",
        section="coverage",
        title="What single clients trained",
        caption="Parameters that a client ever trained, of all that the method has. A point is a client; a box, the "
        "middle half of its device group. The CSV also has the mean share that it trained in one round.",
        keys=("client", "group", "domain", "rounds", "parameters", "share", "mean_share_a_round"),
        rows=rows,
        chart=Boxes(tuple(boxes), "device group", share_axis, all_points=len(rows) <= MANY_CLIENTS),
        height=320,
    )


def statistics(record: Record) -> Table | None:
    """Mean, spread and extremes, over clients, of a client's costs and of its network's metric (Split-Mix, Fig. 5)."""
    of_group: dict[str | None, Cost] = {group.name: group for group in record.start.groups if group.size is not None}
    of_size: dict[str | None, Cost] = {size.label: size for size in record.start.sizes}
    each: dict[str, list[Cost]] = {}
    for part in _taken(record):
        each.setdefault(str(part.client), []).append(of_group.get(part.group) or of_size.get(part.size) or Cost())
    asked: list[tuple[str, str, Callable[[Number | None], str], Callable[[Cost], Number | None]]] = [
        ("parameters", "parameters of one round", count, lambda cost: cost.parameters),
        ("training_macs", "training MACs of a sample", count, lambda cost: cost.training_macs),
    ]
    rows: list[Row] = []
    for key, _, _, value in asked:
        known = [[v for cost in own if (v := value(cost)) is not None] for own in each.values()]
        rows += _row(key, [fmean(values) for values in known if values])
    rows += _row(record.start.metric, [s.score for s in record.client_scores if finite(s.score) is not None])
    if not rows:
        return None
    shows = {key: show for key, _, show, _ in asked}
    words = {key: title for key, title, _, _ in asked}
    last = decimals(value for row in rows if row[0] == record.start.metric for value in row[2:])

    def shown(place: int) -> Callable[[object], str]:
        texts = {row[place]: shows.get(row[0], last)(row[place]) for row in rows}
        return lambda value: texts[value]

    columns = (
        Column("of", "of a client", lambda key: words.get(key, f"{key} on its own held-out samples"), numeric=False),
        Column("clients", "clients", text),
        *(Column(key, key, shown(place)) for place, key in enumerate(("mean", "spread", "least", "most"), 2)),
    )
    caption = "Over the clients that took part, each with the mean over its rounds. Spread: the standard deviation."
    return Table("coverage", caption, columns, tuple(rows), (None,) * len(rows))


def _row(key: str, values: Sequence[Number | None]) -> list[Row]:
    known = [value for value in values if value is not None]
    return [(key, len(known), fmean(known), pstdev(known), min(known), max(known))] if known else []


def _taken(record: Record) -> Iterator[Participation]:
    """Every client's participation in every round that changed something."""
    for round_ in record.rounds:
        if not round_.void:
            yield from round_.clients


def _clients(record: Record, domain: str) -> int:
    return len({str(part.client) for part in _taken(record) if part.domain == domain})


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _bars(
    name: str,
    title: str,
    caption: str,
    keys: tuple[str, ...],
    rows: tuple[Row, ...],
    series: Sequence[tuple[str, Look, dict[str, Number | None]]],
    y_axis: Axis,
) -> Figure:
    """Bars by domain: for each series its name, its look, and its value in each domain."""
    domains = list(dict.fromkeys(row[keys.index("domain")] for row in rows))
    shown = domains[:MANY_DOMAINS]
    if len(domains) > MANY_DOMAINS:
        caption = f"{caption} The first {MANY_DOMAINS} of {len(domains)} domains; all are in the CSV."
    bars = tuple(
        Series(label, tuple(range(len(shown))), tuple(values.get(domain) for domain in shown), own)
        for label, own, values in series
    )
    chart = Bars(bars, Axis("domain", names=tuple(shown)), y_axis)
    return Figure(name, "coverage", title, caption, keys, rows, chart, height=320)
