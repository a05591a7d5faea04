"""Figures of a run: the values as rows for a CSV, and a Plotly specification that shows the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import log

from anysize.report.plots import (
    SERIES,
    Figure,
    Spec,
    axis,
    capital,
    chart,
    finite,
    heat_map,
    line,
    plot_text,
    round_axis,
    shortened,
)
from anysize.report.record import Cost, GroupScore, Number, Partition, Record, Round, total
from anysize.report.tables import ON_CLIENTS, count, decimals, size_bytes

SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "hexagon")
FEW_SIZES = 5  # with more, labels next to the points would cover one another
MANY_CLIENTS = 2000  # more single clients are too many to draw


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
    bars: list[Spec] = [
        {
            "type": "bar",
            "name": plot_text(name),
            "x": [round_.round for round_ in rounds],
            "y": [finite(round_.profile.get(name)) for round_ in rounds],
            "marker": {"color": SERIES[index % len(SERIES)][0], "line": {"width": 0}},
            "hovertemplate": "%{y:.3f} s",
        }
        for index, name in enumerate(stages)
    ]
    spec = chart(bars, round_axis(record), axis("seconds"), legend="stage")
    spec["layout"] |= {"barmode": "stack", "showlegend": True}
    return Figure(
        name="profile-rounds",
        section="time",
        title="Seconds of each round by stage",
        caption="",
        keys=("round", "stage", "seconds"),
        rows=tuple((round_.round, name, spent) for round_ in rounds for name, spent in round_.profile.items()),
        spec=spec,
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
    rows = tuple(
        (round_.round, label, round_.scores[label], *(round_.value(label, name) for name in others))
        for round_ in rounds
        for label in record.labels
        if label in round_.scores
    )
    return Figure(
        name="over-rounds",
        section="rounds",
        title=f"{capital(metric)} over rounds",
        caption=_direction(record),
        keys=("round", "size", metric, *others),
        rows=rows,
        spec=chart(
            _curves(record, [round_.round for round_ in rounds]),
            round_axis(record),
            _score_axis(record),
        ),
        height=380,
        wide=True,
    )


def training_loss(record: Record) -> Figure | None:
    """The participants' training loss in every round."""
    rows = tuple((round_.round, round_.train_loss) for round_ in record.rounds if round_.train_loss is not None)
    if not rows:
        return None
    trace = line([row[0] for row in rows], [row[1] for row in rows], "var(--accent)", "circle")
    loss = {**axis("training loss"), "hoverformat": ".4f"}
    return Figure(
        name="training-loss",
        section="rounds",
        title="Training loss over rounds",
        caption="Mean over the participants of each round, whatever their size.",
        keys=("round", "train_loss"),
        rows=rows,
        spec=chart([trace], round_axis(record), loss),
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
    show_score = decimals(row[2] for row in rows)
    points = {
        "type": "scatter",
        "mode": "lines+markers+text" if len(rows) <= FEW_SIZES else "lines+markers",
        "x": [row[1] for row in rows],
        "y": [finite(row[2]) for row in rows],
        "cliponaxis": False,
        "line": {"color": "var(--line)", "width": 1.5},
        "marker": {
            "size": 11,
            "color": [colour(record, row[0]) for row in rows],
            "symbol": [symbol(record, row[0]) for row in rows],
        },
        "text": [plot_text(shortened(row[0])) for row in rows],
        "textposition": "top center",
        "hovertext": [
            f"<b>{plot_text(label)}</b><br>{show(cost)} {'' if show is size_bytes else name}"
            f"<br>{plot_text(metric)} {show_score(score)}"
            for label, cost, score in rows
        ],
        "hoverinfo": "text",
    }
    # A logarithm needs costs above zero; a size that sends nothing is still shown, on a linear axis.
    scale = "log" if all(row[1] > 0 for row in rows) else "linear"
    x_axis = {**axis(words), "type": scale, **_ticks([row[1] for row in rows], show)}
    return Figure(
        name=f"against-{name}",
        section="cost",
        title=f"{capital(metric)} against {'MACs' if name == 'macs' else name}",
        caption="",
        keys=("size", name, metric),
        rows=rows,
        spec=chart([points], x_axis, _score_axis(record), hovermode="closest"),
        height=270,
    )


def against_traffic(record: Record) -> Figure | None:
    """The metric of every size against the bytes that all clients had moved by then, down and up."""
    moved = running_total(record.rounds, lambda round_: total([round_.bytes_down, round_.bytes_up]))
    x_axis = {
        **axis("bytes moved by all clients", from_zero=True),
        "tickformat": "~s",
        "ticksuffix": "B",
        "hoverformat": ".3s",
    }
    return _against_running_total(record, moved, "bytes", "against-traffic", "cumulative bytes", x_axis)


def against_virtual_time(record: Record) -> Figure | None:
    """The metric of every size against the fleet's time: that of each round's slowest participant, added up."""
    passed = running_total(record.rounds, lambda round_: round_.virtual_seconds)
    unit, seconds = _time_unit(max((value for value in passed if value is not None), default=0))
    x_axis = {**axis(f"virtual time ({unit})", from_zero=True), "hoverformat": ".1f"}
    return _against_running_total(
        record, passed, "virtual_seconds", "against-virtual-time", "virtual time", x_axis, seconds
    )


def client_rounds(record: Record) -> Figure | None:
    """The mean metric of each group's clients on their own held-out samples, after every round that asked them."""
    rounds, metric = [round_ for round_ in record.rounds if round_.client_metrics], record.start.metric
    names = list(dict.fromkeys(name for round_ in rounds for name in round_.client_metrics))
    trained = {group.name: group.size or group.name for group in record.start.groups}
    sizes = {trained.get(name, name) for name in names}
    if not rounds or (record.on_clients and len(sizes) == len(names)):  # then the sizes' curves are these
        return None
    curves = []
    for name in names:
        size = trained.get(name, name)
        x = [round_.round for round_ in rounds]
        y = [round_.client_metrics.get(name, GroupScore()).mean for round_ in rounds]
        curves.append({**line(x, y, colour(record, size), symbol(record, size)), "name": plot_text(name)})
    return Figure(
        name="client-rounds",
        section="clients",
        title=f"{capital(metric)} on the clients’ own data over rounds",
        caption="Mean over the clients of a group, each on samples that it never trained on.",
        keys=("round", "group", "clients", metric),
        rows=tuple((r.round, n, score.clients, score.mean) for r in rounds for n, score in r.client_metrics.items()),
        spec=chart(curves, round_axis(record), _score_axis(record), legend="group"),
        height=320,
        wide=True,
    )


def client_distribution(record: Record) -> Figure | None:
    """The metric of every client on its own held-out samples, by device group."""
    scores, metric = record.client_scores, record.start.metric
    if not scores:
        return None
    known = [group.name for group in record.start.groups]
    names = list(dict.fromkeys([*known, *(score.group for score in scores)]))
    trained = {group.name: group.size for group in record.start.groups}
    boxes = []
    for name in names:
        members = [score for score in scores if score.group == name and finite(score.score) is not None]
        boxes.append(
            {
                "type": "box",
                "name": plot_text(name),
                "y": [score.score for score in members],
                "text": [plot_text(record.called(score.client)) for score in members],
                "boxpoints": "all" if len(scores) <= MANY_CLIENTS else "outliers",
                "jitter": 0.5,
                "pointpos": 0,
                "marker": {"size": 5, "opacity": 0.75, "color": colour(record, trained.get(name) or name)},
                "line": {"width": 1.5},
                "fillcolor": "rgba(0,0,0,0)",
                "hoveron": "points",
                "showlegend": False,
            }
        )
    return Figure(
        name="client-distribution",
        section="clients",
        title=f"{capital(metric)} of single clients",
        caption=f"After round {scores[0].round}. A point is a client; a box, the middle half of its device group.",
        keys=("round", "client", "group", "size", "samples", metric),
        rows=tuple((s.round, s.client, s.group, s.size, s.samples, s.score) for s in scores),
        spec=chart(boxes, {**axis("device group"), "type": "category"}, _score_axis(record), hovermode="closest"),
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


def colour(record: Record, label: str) -> str:
    """The CSS variable with a size's colour: the same size has the same colour everywhere."""
    return f"var(--size-{record.labels.index(label)})" if label in record.labels else "var(--accent)"


def symbol(record: Record, label: str) -> str:
    """A size's marker, so that sizes differ by more than colour."""
    return SYMBOLS[record.labels.index(label) % len(SYMBOLS)] if label in record.labels else SYMBOLS[0]


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
    x_axis: Spec,
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
        spec=chart(_curves(record, x), x_axis, _score_axis(record)),
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
    heat = {
        **heat_map(z, "samples"),
        "text": [[f"class {plot_text(label)}"] * len(histogram) for label in labels],
        "hovertemplate": "client %{x}<br>%{text}<br>%{z} samples<extra></extra>",
        "zmin": 0,
        "xgap": 1 if len(histogram) <= 100 else 0,
        "ygap": 1,
    }
    each = 1 if classes <= 40 else -(-classes // 20)
    class_axis = {
        **axis("class"),
        "showgrid": False,
        "autorange": "reversed",
        "tickvals": list(range(0, classes, each)),
        "ticktext": [plot_text(shortened(label)) for label in labels[::each]],
    }
    client_axis = {**axis("client"), "showgrid": False, **_client_ticks(len(histogram))}
    return Figure(
        name="labels",
        section="partition",
        title="Samples per class and client",
        caption=whom,
        keys=("client", "class", "samples"),
        rows=rows,
        spec=chart([heat], client_axis, class_axis, hovermode="closest"),
        height=min(90 + max(classes, 4) * 22, 620),
        wide=True,
    )


def _samples(samples: Sequence[Number], whom: str) -> Figure:
    """How many samples each client holds."""
    bars = {
        "type": "bar",
        "x": list(range(len(samples))),
        "y": list(samples),
        "marker": {"color": "var(--accent)", "line": {"width": 0}},
        "hovertemplate": "client %{x}<br>%{y} samples<extra></extra>",
    }
    x_axis = {**axis("client"), "showgrid": False, **_client_ticks(len(samples))}
    return Figure(
        name="samples",
        section="partition",
        title="Samples per client",
        caption=whom,
        keys=("client", "samples"),
        rows=tuple(enumerate(samples)),
        spec=chart([bars], x_axis, axis("samples"), hovermode="closest"),
        height=240,
        wide=True,
    )


def _curves(record: Record, x: Sequence[Number | None]) -> list[Spec]:
    """One line per size through the evaluated rounds, at the given positions."""
    curves = []
    for label in record.labels:
        y = [finite(round_.scores.get(label)) for round_ in record.evaluated]
        curves.append({**line(x, y, colour(record, label), symbol(record, label)), "name": plot_text(label)})
    return curves


def _score_axis(record: Record) -> Spec:
    values = [value for round_ in record.evaluated for value in round_.scores.values() if value is not None]
    places = len(decimals(values)(0.0)) - 2
    return {**axis(plot_text(record.start.metric)), "hoverformat": f".{places}f"}


def _client_ticks(clients: int) -> Spec:
    """Ticks at whole client numbers; at every one if there is room."""
    return {"dtick": 1} if clients <= 40 else {"tick0": 0, "dtick": 10 if clients <= 100 else 20}


def _ticks(values: Sequence[Number], show: Callable[[Number | None], str]) -> Spec:
    """Ticks at the values themselves, as many as fit: they say more than powers of ten."""
    ordered = sorted(set(values))
    places = [log(value) if ordered[0] > 0 else value for value in ordered]
    room = (places[-1] - places[0]) / 3.5
    kept = [0]
    for index in range(1, len(places) - 1):
        if min(places[index] - places[kept[-1]], places[-1] - places[index]) >= room:
            kept.append(index)
    kept += [len(places) - 1] * (len(places) > 1)
    return {
        "tickvals": [ordered[index] for index in kept],
        "ticktext": [show(ordered[index]) for index in kept],
        "tickangle": 0,
    }


def _time_unit(seconds: Number) -> tuple[str, int]:
    """The unit in which a time is easy to read, and how many seconds it has."""
    if seconds < 300:
        return "seconds", 1
    return ("minutes", 60) if seconds < 3 * 3600 else ("hours", 3600)


def _direction(record: Record) -> str:
    better = "Higher" if record.start.higher_is_better else "Lower"
    return f"{better} is better. {ON_CLIENTS}" if record.on_clients else f"{better} is better."
