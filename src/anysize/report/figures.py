"""Figures of a run: the values as rows for a CSV, and a chart that shows the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from anysize.report.charts import (
    ACCENT,
    SERIES,
    Axis,
    Bars,
    Box,
    Boxes,
    Figure,
    Lines,
    Series,
    capital,
    colour,
    finite,
    heat_map,
    line,
    look,
    round_axis,
    shortened,
)
from anysize.report.record import Cost, GroupScore, Number, Partition, Record, Round, total
from anysize.report.tables import ON_CLIENTS, count, decimals, size_bytes

FEW_SIZES = 5  # with more, labels next to the points would cover one another
MANY_CLIENTS = 2000  # more single clients are too many to draw
SPREAD = "The band is one standard deviation over the clients to both sides."


def build(record: Record) -> list[Figure]:
    """Every figure for which the run has values, in the order of the page."""
    figures = [
        over_rounds(record),
        training_loss(record),
        against_cost(record, "parameters", "parameters", count, lambda cost: cost.parameters),
        against_cost(record, "macs", "MACs of one forward pass", count, lambda cost: cost.macs),
        against_cost(record, "bytes", "bytes per client and round", size_bytes, lambda cost: cost.traffic),
        against_traffic(record),
        against_virtual_time(record),
        client_rounds(record),
        client_distribution(record),
        *partition_figures(record.start.partition),
        time_by_stage(record),
    ]
    return [figure for figure in figures if figure is not None]


def time_by_stage(record: Record) -> Figure | None:
    """The seconds of each stage of every profiled round, stacked."""
    rounds = [round_ for round_ in record.rounds if round_.profile]
    if not rounds:
        return None
    stages = list(dict.fromkeys(name for round_ in rounds for name in round_.profile))
    bars = tuple(
        Series(
            name,
            tuple(round_.round for round_ in rounds),
            tuple(finite(round_.profile.get(name)) for round_ in rounds),
            SERIES[index % len(SERIES)],
        )
        for index, name in enumerate(stages)
    )
    seconds = Axis("seconds", exact=lambda value: f"{value:.3f} s", from_zero=True)
    return Figure(
        name="profile-rounds",
        section="time",
        title="Seconds of each round by stage",
        caption="",
        keys=("round", "stage", "seconds"),
        rows=tuple((round_.round, name, spent) for round_ in rounds for name, spent in round_.profile.items()),
        chart=Bars(bars, round_axis(), seconds, legend="stage", stacked=True),
        wide=True,
    )


def over_rounds(record: Record) -> Figure | None:
    """The metric of every size after every evaluated round; the CSV has the other metrics too."""
    rounds, metric = record.evaluated, record.start.metric
    if not rounds:
        return None
    others = list(
        dict.fromkeys(
            name
            for round_ in rounds
            for label in record.labels
            for name in round_.metrics.get(label, ())
            if name != metric
        )
    )
    keys = ("round", "size", metric, *others, *(["spread"] if record.on_clients else []))
    rows = tuple(
        (round_.round, label, round_.scores[label], *(round_.value(label, name) for name in others))
        + ((round_.spreads.get(label),) if record.on_clients else ())
        for round_ in rounds
        for label in record.labels
        if label in round_.scores
    )
    return Figure(
        name="over-rounds",
        section="rounds",
        title=f"{capital(metric)} over rounds",
        caption=_direction(record),
        keys=keys,
        rows=rows,
        chart=Lines(_curves(record, [round_.round for round_ in rounds]), round_axis(), _score_axis(record)),
        height=380,
        wide=True,
    )


def training_loss(record: Record) -> Figure | None:
    """The participants' training loss in every round."""
    rows = tuple((round_.round, round_.train_loss) for round_ in record.rounds if round_.train_loss is not None)
    if not rows:
        return None
    curve = line("", [row[0] for row in rows], [row[1] for row in rows], ACCENT)
    loss = Axis("training loss", exact=lambda value: f"{value:.4f}")
    return Figure(
        name="training-loss",
        section="rounds",
        title="Training loss over rounds",
        caption="Mean over the participants of each round, whatever their size, of what each one minimised: for some "
        "methods the sum over several widths, so compare it only between runs of one method.",
        keys=("round", "train_loss"),
        rows=rows,
        chart=Lines((curve,), round_axis(), loss),
        height=260,
        wide=True,
    )


def against_cost(
    record: Record,
    name: str,
    words: str,
    show: Callable[[Number | None], str],
    cost_of: Callable[[Cost], Number | None],
) -> Figure | None:
    """The metric of every size after the last evaluated round, against one kind of cost."""
    if record.latest is None:
        return None
    metric, scores = record.start.metric, record.latest.scores
    costs = {size.label: cost_of(size) for size in record.start.sizes}
    rows = tuple(
        (label, cost, score)
        for label in record.labels
        if (cost := costs.get(label)) is not None and (score := scores.get(label)) is not None
    )
    if not rows:
        return None
    labels = [shortened(row[0]) for row in rows]
    points = Series(
        "",
        tuple(row[1] for row in rows),
        tuple(finite(row[2]) for row in rows),
        ACCENT,
        labels=tuple(labels) if len(rows) <= FEW_SIZES else (),
        looks=tuple(look(record, row[0]) for row in rows),
    )
    # A logarithm needs costs above zero; a size that sends nothing is still shown, on a linear axis.
    ticks = tuple((row[1], show(row[1])) for row in rows)
    x_axis = Axis(words, show=show, log=all(row[1] > 0 for row in rows), ticks=ticks)
    return Figure(
        name=f"against-{name}",
        section="cost",
        title=f"{capital(metric)} against {'MACs' if name == 'macs' else name}",
        caption="",
        keys=("size", name, metric),
        rows=rows,
        chart=Lines((points,), x_axis, _score_axis(record), together=False),
        height=270,
    )


def against_traffic(record: Record) -> Figure | None:
    """The metric of every size against the bytes that all clients had moved by then, down and up."""
    moved = running_total(record.rounds, lambda round_: total([round_.bytes_down, round_.bytes_up]))
    x_axis = Axis("bytes moved by all clients", show=size_bytes, from_zero=True)
    return _against_running_total(record, moved, "bytes", "against-traffic", "cumulative bytes", x_axis)


def against_virtual_time(record: Record) -> Figure | None:
    """The metric of every size against the fleet's time: that of each round's slowest participant, added up."""
    passed = running_total(record.rounds, lambda round_: round_.virtual_seconds)
    unit, seconds = _time_unit(max((value for value in passed if value is not None), default=0))
    x_axis = Axis(f"virtual time ({unit})", exact=lambda value: f"{value:.1f} {unit}", from_zero=True)
    return _against_running_total(
        record, passed, "virtual_seconds", "against-virtual-time", "virtual time", x_axis, seconds
    )


def client_rounds(record: Record) -> Figure | None:
    """The mean metric of each group's clients on their own held-out samples, after every round that asked them."""
    rounds, metric = [round_ for round_ in record.rounds if round_.client_metrics], record.start.metric
    names = record.by_size(name for round_ in rounds for name in round_.client_metrics)
    trained = {group.name: group.size or group.name for group in record.start.groups}
    sizes = {trained.get(name, name) for name in names}
    if not rounds or (record.on_clients and len(sizes) == len(names)):  # then the sizes' curves are these
        return None
    curves = []
    for name in names:
        scores = [round_.client_metrics.get(name, GroupScore()) for round_ in rounds]
        x, y = [round_.round for round_ in rounds], [score.mean for score in scores]
        curves.append(line(name, x, y, look(record, trained.get(name, name)), [score.spread for score in scores]))
    return Figure(
        name="client-rounds",
        section="clients",
        title=f"{capital(metric)} on the clients’ own data over rounds",
        caption=f"Mean over the clients of a group, each on samples that it never trained on. {SPREAD}",
        keys=("round", "group", "clients", metric, "spread"),
        rows=tuple(
            (r.round, n, score.clients, score.mean, score.spread)
            for r in rounds
            for n, score in r.client_metrics.items()
        ),
        chart=Lines(tuple(curves), round_axis(), _score_axis(record), legend="group"),
        height=320,
        wide=True,
    )


def client_distribution(record: Record) -> Figure | None:
    """The metric of every client on its own held-out samples, by device group."""
    scores, metric = record.client_scores, record.start.metric
    if not scores:
        return None
    trained = {group.name: group.size for group in record.start.groups}
    boxes = []
    for name in record.by_size([*trained, *(score.group for score in scores)]):
        own = [(s.score, record.called(s.client)) for s in scores if s.group == name and finite(s.score) is not None]
        values = tuple(value for value, _ in own if value is not None)
        boxes.append(Box(name, values, tuple(who for _, who in own), colour(record, trained.get(name) or name)))
    return Figure(
        name="client-distribution",
        section="clients",
        title=f"{capital(metric)} of single clients",
        caption=f"After round {scores[0].round}. A point is a client; a box, the middle half of its device group.",
        keys=("round", "client", "group", "size", "samples", metric),
        rows=tuple((s.round, s.client, s.group, s.size, s.samples, s.score) for s in scores),
        chart=Boxes(tuple(boxes), "device group", _score_axis(record), all_points=len(scores) <= MANY_CLIENTS),
        height=320,
        wide=True,
    )


def partition_figures(partition: Partition | None) -> list[Figure]:
    """Which classes and how many samples each listed client holds."""
    if partition is None or not partition.samples:
        return []
    listed = len(partition.samples)
    whom = (
        f"The first {listed} of {partition.clients} clients."
        if listed < partition.clients
        else f"All {listed} clients."
    )
    figures = [_samples(partition.samples, whom)]
    if partition.histogram:
        figures.insert(0, _labels(partition.histogram, partition.class_names, whom))
    return figures


def running_total(rounds: Iterable[Round], value_of: Callable[[Round], Number | None]) -> list[Number | None]:
    """The sum up to each round; None from the first round with an unknown value on."""
    sums: list[Number | None] = []
    for round_ in rounds:
        sums.append(total([sums[-1] if sums else 0, value_of(round_)]))
    return sums


def _against_running_total(
    record: Record,
    totals: Sequence[Number | None],
    key: str,
    name: str,
    words: str,
    x_axis: Axis,
    unit: Number = 1,
) -> Figure | None:
    """The metric against something that adds up over the rounds, shown in a multiple of its unit."""
    at = {round_.round: value for round_, value in zip(record.rounds, totals)}
    rows = tuple(
        (round_.round, at[round_.round], label, round_.scores[label])
        for round_ in record.evaluated
        for label in record.labels
        if label in round_.scores and at[round_.round] is not None
    )
    if not rows:
        return None
    x = [None if (value := at[round_.round]) is None else value / unit for round_ in record.evaluated]
    return Figure(
        name=name,
        section="progress",
        title=f"{capital(record.start.metric)} against {words}",
        caption="",
        keys=("round", key, "size", record.start.metric),
        rows=rows,
        chart=Lines(_curves(record, x), x_axis, _score_axis(record)),
        height=320,
    )


def _labels(histogram: Sequence[Sequence[Number]], names: Sequence[str] | None, whom: str) -> Figure:
    """How many samples of each class each client holds."""
    classes = max(len(row) for row in histogram)
    known = [*(names or ())][:classes]
    labels = known + [str(index) for index in range(len(known), classes)]
    rows = tuple(
        (client, label, samples) for client, row in enumerate(histogram) for label, samples in zip(labels, row)
    )
    z = [[row[index] if index < len(row) else None for row in histogram] for index in range(classes)]
    each = 1 if classes <= 40 else -(-classes // 20)
    ticks = tuple((place, shortened(labels[place])) for place in range(0, classes, each))
    class_axis = Axis("class", ticks=ticks, exact=lambda place: labels[round(place)])
    heat = replace(
        heat_map(z, Axis("client", whole=True), class_axis, "samples"), from_zero=True, gaps=len(histogram) <= 100
    )
    return Figure(
        name="labels",
        section="partition",
        title="Samples per class and client",
        caption=whom,
        keys=("client", "class", "samples"),
        rows=rows,
        chart=heat,
        height=min(90 + max(classes, 4) * 22, 620),
        wide=True,
    )


def _samples(samples: Sequence[Number], whom: str) -> Figure:
    """How many samples each client holds."""
    bars = Series("", tuple(range(len(samples))), tuple(samples), ACCENT)
    clients = Axis("client", whole=True, exact=lambda value: f"client {value:g}")
    return Figure(
        name="samples",
        section="partition",
        title="Samples per client",
        caption=whom,
        keys=("client", "samples"),
        rows=tuple(enumerate(samples)),
        chart=Bars((bars,), clients, Axis("samples", exact=lambda value: f"{value:g} samples", from_zero=True)),
        height=240,
        wide=True,
    )


def _curves(record: Record, x: Sequence[Number | None]) -> tuple[Series, ...]:
    """One line per size through the evaluated rounds, at the given positions."""
    curves = []
    for label in record.labels:
        y = [round_.scores.get(label) for round_ in record.evaluated]
        spread = [round_.spreads.get(label) for round_ in record.evaluated] if record.on_clients else []
        curves.append(line(label, x, y, look(record, label), spread))
    return tuple(curves)


def _score_axis(record: Record) -> Axis:
    values = [value for round_ in record.evaluated for value in round_.scores.values() if value is not None]
    return Axis(record.start.metric, exact=decimals(values))


def _time_unit(seconds: Number) -> tuple[str, int]:
    """The unit in which a time is easy to read, and how many seconds it has."""
    if seconds < 300:
        return "seconds", 1
    return ("minutes", 60) if seconds < 3 * 3600 else ("hours", 3600)


def _direction(record: Record) -> str:
    better = "Higher" if record.start.higher_is_better else "Lower"
    return f"{better} is better. {ON_CLIENTS} {SPREAD}" if record.on_clients else f"{better} is better."
