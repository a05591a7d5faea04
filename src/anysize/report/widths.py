"""Sizes side by side: how good each is, and its message compared with the ordinary network of its size."""

from __future__ import annotations

from anysize.report.charts import ACCENT, Axis, Bars, Figure, Lines, Series, capital, finite, look
from anysize.report.record import Record
from anysize.report.tables import decimals, size_bytes


def build(record: Record) -> list[Figure]:
    """The figures for which there are numbers."""
    return [figure for figure in (by_size(record), against_dense(record)) if figure is not None]


def by_size(record: Record) -> Figure | None:
    """The metric of every size after the last evaluated round, and how many clients train at that size."""
    if record.latest is None:
        return None
    metric, scores = record.start.metric, record.latest.scores
    clients = dict.fromkeys(record.labels, 0)
    for group in record.start.groups:
        if group.size in clients:
            clients[group.size] += int(group.clients or 0)
    rows = tuple((label, clients[label], scores[label]) for label in record.labels if label in scores)
    if not rows:
        return None
    labels = [row[0] for row in rows]
    spread = [finite(record.latest.spreads.get(label)) for label in labels] if record.on_clients else []
    curve = Series(
        "",
        tuple(range(len(rows))),
        tuple(finite(row[2]) for row in rows),
        ACCENT,
        spread=tuple(spread),
        looks=tuple(look(record, label) for label in labels),
    )
    told = ", ".join(f"{label}: {count}" for label, count, _ in rows)
    bars = " Bars: one standard deviation over the clients." if spread else ""
    return Figure(
        name="by-size",
        section="cost",
        title=f"{capital(metric)} by size",
        caption=f"Clients per size: {told}.{bars}",
        keys=("size", "clients", metric),
        rows=rows,
        chart=Lines((curve,), Axis("size", names=tuple(labels)), Axis(metric, exact=decimals(scores.values()))),
        height=270,
    )


def against_dense(record: Record) -> Figure | None:
    """The bytes that one client receives in a round, compared with the ordinary network of that size sent whole."""
    rows = tuple(
        (size.label, finite(size.bytes_down), finite(size.inference_bytes))
        for size in record.start.sizes
        if finite(size.bytes_down) is not None and size.inference_bytes
    )
    if not rows:
        return None
    labels = tuple(row[0] for row in rows)
    looks = tuple(look(record, label) for label in labels)
    places, neutral = tuple(range(len(rows))), ("var(--soft)", "square")
    bars = (
        Series("as sent", places, tuple(sent for _, sent, _ in rows), neutral, looks=looks),
        Series("ordinary network", places, tuple(whole for _, _, whole in rows), neutral, looks=looks, hollow=True),
    )
    parts = ", ".join(f"{label}: {sent / whole:.0%}" for label, sent, whole in rows if sent is not None and whole)
    down = Axis("bytes down", show=size_bytes, from_zero=True)
    return Figure(
        name="against-dense",
        section="cost",
        title="Message to a client, compared with its ordinary network",
        caption=f"Bytes sent, relative to the ordinary network of that size: {parts}.",
        keys=("size", "bytes_down", "ordinary_network_bytes"),
        rows=rows,
        chart=Bars(bars, Axis("size", names=labels), down, legend=""),
        height=270,
    )
