"""Sizes side by side: how good each is, and its message compared with the ordinary network of its size."""

from __future__ import annotations

from anysize.report.plots import SERIES, Figure, Spec, axis, capital, chart, finite, line, plot_text, shortened
from anysize.report.record import Record


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
    curve = line([], [row[2] for row in rows], "var(--accent)", "circle")
    curve |= {"x": [plot_text(shortened(label)) for label, _, _ in rows], "mode": "lines+markers"}
    curve["text"] = [f"trained by {count} clients" for _, count, _ in rows]
    told = ", ".join(f"{label}: {count}" for label, count, _ in rows)
    return Figure(
        name="by-size",
        section="cost",
        title=f"{capital(metric)} by size",
        caption=f"Clients per size: {told}.",
        keys=("size", "clients", metric),
        rows=rows,
        spec=chart([curve], _sizes(), axis(plot_text(metric))),
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
    labels = [plot_text(shortened(row[0])) for row in rows]
    bars: list[Spec] = [
        {"type": "bar", "name": name, "x": labels, "y": [row[place] for row in rows], "marker": {"color": SERIES[i][0]}}
        for i, (name, place) in enumerate((("as sent", 1), ("ordinary network", 2)))
    ]
    parts = ", ".join(f"{label}: {sent / whole:.0%}" for label, sent, whole in rows if sent is not None and whole)
    spec = chart(bars, _sizes(), {**axis("bytes down", from_zero=True), "tickformat": "~s", "ticksuffix": "B"})
    spec["layout"] |= {"showlegend": True, "barmode": "group"}
    spec["layout"]["legend"]["title"]["text"] = ""
    return Figure(
        name="against-dense",
        section="cost",
        title="Message to a client, compared with its ordinary network",
        caption=f"Bytes sent, relative to the ordinary network of that size: {parts}.",
        keys=("size", "bytes_down", "ordinary_network_bytes"),
        rows=rows,
        spec=spec,
        height=270,
    )


def _sizes() -> Spec:
    return {**axis("size"), "type": "category"}
