"""Accuracy on clean samples against accuracy under attack: what robustness costs at every size."""

from __future__ import annotations

from dataclasses import replace

from anysize.report.charts import Axis, Figure, Lines, Series, finite, line, look
from anysize.report.record import Number, Record, Round, TradeOff
from anysize.report.tables import Column, Table, decimals, text


def build(record: Record) -> list[Figure]:
    """The figures for which there are numbers."""
    figure = trade_off(record)
    return [] if figure is None else [figure]


def measured(record: Record) -> Round | None:
    """The last round after which networks were attacked."""
    attacked = [round_ for round_ in record.rounds if round_.robust]
    return attacked[-1] if attacked else None


def trade_off(record: Record) -> Figure | None:
    """A curve per size: the metric on clean samples against the metric under attack, level by level."""
    latest = measured(record)
    if latest is None:
        return None
    metric = record.start.metric
    curves = tuple(_curve(record, label, latest.robust[label]) for label in _labels(record, latest))
    show = decimals(value for _, _, *values in _rows(record, latest) for value in values)
    corner = "upper right" if record.start.higher_is_better else "lower left"
    return Figure(
        name="trade-off",
        section="robustness",
        title=f"Standard against robust {metric}",
        caption=f"After round {latest.round}. A point is a level of robustness, from 0 (accurate) to 1 (robust) where "
        f"there is a choice. Better is {corner}.",
        keys=("round", "size", "robustness", "standard", "robust"),
        rows=tuple((latest.round, *row) for row in _rows(record, latest)),
        chart=Lines(
            curves,
            Axis(f"{metric} under attack", exact=show),
            Axis(f"{metric} on clean samples", exact=show),
            together=False,
        ),
        height=380,
        wide=True,
    )


def levels(record: Record) -> Table | None:
    """One row per size and level of robustness: the metric on samples, clean and under attack."""
    latest = measured(record)
    if latest is None:
        return None
    metric, rows = record.start.metric, _rows(record, latest)
    columns = (
        Column("size", "size", text, numeric=False),
        Column("robustness", "robustness", text),
        Column("standard", f"{metric}, clean", decimals(row[2] for row in rows)),
        Column("robust", f"{metric}, attacked", decimals(row[3] for row in rows)),
    )
    caption = (
        f"Measured after round {latest.round}, on the same samples with and without the attack of [evaluation]. "
        "Another attack may succeed more often."
    )
    return Table("robustness", caption, columns, tuple(rows), tuple(row[0] for row in rows))


def _labels(record: Record, latest: Round) -> list[str]:
    """The attacked sizes, in the order of the report."""
    known = [label for label in record.labels if label in latest.robust]
    return known + [label for label in latest.robust if label not in known]


def _rows(record: Record, latest: Round) -> list[tuple[str, Number | None, Number | None, Number | None]]:
    return [
        (label, point.robustness, point.standard, point.robust)
        for label in _labels(record, latest)
        for point in latest.robust[label]
    ]


def _curve(record: Record, label: str, points: list[TradeOff]) -> Series:
    x, y = [finite(point.robust) for point in points], [point.standard for point in points]
    several = len(points) > 1
    shown = tuple("" if point.robustness is None else f"{point.robustness:g}" for point in points)
    return replace(line(label, x, y, look(record, label)), joined=several, labels=shown if several else ())
