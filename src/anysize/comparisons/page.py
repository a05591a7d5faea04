"""One HTML page of a comparison: self-contained, without scripts, with every text from a file escaped."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anysize.comparisons import figures
from anysize.comparisons.comparison import EQUAL_UNITS, MEAN, Comparison, Row, in_percent, shown
from anysize.comparisons.figures import Dots, Line, Point
from anysize.comparisons.statistics import spread
from anysize.comparisons.writing import tables
from anysize.report.browser import style
from anysize.report.tables import MISSING, count, size_bytes, times

_STYLE = """
.figure { width: 100%; height: auto; display: block; margin-top: 8px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 14px; padding: 0; list-style: none; }
.legend li { display: flex; align-items: center; gap: 6px; font-size: 13.5px; }
.legend li, h1, h2, nav a { overflow-wrap: anywhere; }
.swatch-line { width: 24px; height: 14px; flex: none; }
.std { color: var(--soft); font-weight: 400; font-size: 0.88em; }
.top { font-weight: 700; }
tbody th { min-width: 110px; }
.equal { margin: 0; padding-left: 20px; } .equal li + li { margin-top: 6px; } .equal li { overflow-wrap: anywhere; }
.part { margin: 24px 0 10px; font-size: 15px; } details .card { border: 0; padding: 10px 0 0; }
details.card { margin-top: 16px; }
nav { margin-top: 14px; font-size: 14px; display: flex; flex-wrap: wrap; gap: 4px 16px; }
@media print { .std { color: inherit; } }
"""

_UNITS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "bytes": ("bytes of a client in a round", size_bytes),
    "training_macs": ("training multiply-adds of a sample", count),
    "activation_bytes": ("activations of a training step", size_bytes),
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render(made: Comparison) -> str:
    """The whole page."""
    sections = [part for setting in made.settings for part in _setting(made, setting)]
    body = "\n".join(
        [
            _header(made),
            "<main>",
            *sections,
            _statements(made),
            _runs(made),
            "</main>",
            "<footer>Written by anysize. Hover over a point or a rounded number for the exact values; compare.csv, "
            "compare.json and the folder compare hold all of them.</footer>",
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(_name(made))} · anysize</title>\n<style>{style()}{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _name(made: Comparison) -> str:
    return made.directory.resolve().name


def _header(made: Comparison) -> str:
    first = made.outcomes[0].config
    facts = [
        f"<b>{times(len(made.methods), 'method')}</b>",
        f"{html.escape(first.model.name)} on {html.escape(first.data.name)}",
        times(len(made.settings), "setting") if made.settings != ("",) else "",
        f"seeds {', '.join(map(str, made.seeds))}" if len(made.seeds) > 1 else f"seed {made.seeds[0]}",
        times(made.rounds, "round"),
        f"{html.escape(made.metric)} on {_judged(made)}",
        _state(made),
    ]
    line = " ".join(f"<span>{fact}</span>" for fact in facts if fact)
    links = "".join(f'<a href="#{_id(s)}">{html.escape(s)}</a>' for s in made.settings if s)
    links += '<a href="#equal">What was equal</a><a href="#runs">Runs</a>'
    return f'<header>\n<h1>{html.escape(_name(made))}</h1>\n<p class="what">{line}</p>\n<nav>{links}</nav>\n</header>'


def _state(made: Comparison) -> str:
    if made.failures:
        return f'<span class="running">{times(len(made.failures), "run")} failed</span>'
    if made.missing:
        return f'<span class="running">{times(len(made.missing), "run")} not finished</span>'
    return '<span class="finished">finished</span>'


def _judged(made: Comparison) -> str:
    return "the test set" if made.judged_on == "test" else "clients’ held-out data"


def _id(setting: str) -> str:
    return "s-" + "".join(sign if sign.isalnum() else "-" for sign in setting)


def _setting(made: Comparison, setting: str) -> Iterator[str]:
    """The figures and tables of one setting."""
    title = setting or "Result"
    drawn = [method for method in made.methods if made.row(method, MEAN, setting) is not None]
    places = {method: place for place, method in enumerate(made.methods)}
    legend = "".join(f"<li>{figures.swatch(places[method])}{html.escape(method)}</li>" for method in drawn)
    plots = [
        ("Mean of sizes", _dot_plot(made, setting, drawn, places), _dots_note(made)),
        ("By size", _by_size(made, setting, drawn, places), ""),
        ("By what a client sends and receives", _by_cost(made, setting, drawn, places), "Bytes both ways, in a round."),
        ("Over the rounds", _curves(made, setting, drawn, places), "The mean of sizes; mean over the seeds."),
    ]
    shown_plots = "".join(_card(name, svg, note) for name, svg, note in plots if svg)
    yield (
        f'<section id="{_id(setting)}">\n<h2>{html.escape(title)}</h2>\n{_main_table(made, setting, drawn)}'
        f'<div class="card"><ul class="legend" style="margin: 0">{legend}</ul></div>\n'
        f'<div class="grid two">{shown_plots}</div>\n{_equal_cost(made, setting, drawn)}{_reached(made, setting)}'
        f"{_costs(made, setting, drawn)}</section>"
    )


def _card(title: str, content: str, note: str) -> str:
    below = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f'<figure class="card"><h3>{html.escape(title)}</h3>{content}{below}</figure>\n'


def _dots_note(made: Comparison) -> str:
    bars = "Bars: one standard deviation over the seeds; faint dots: seeds. " if len(made.seeds) > 1 else ""
    line = f" Dashed: {made.baseline}." if made.baseline else ""
    return f"{bars}Hollow: at the best round, which is too good a figure.{line}"


def _axis(made: Comparison) -> tuple[str, Callable[[float], str]]:
    """What the axis of the metric is called, and how its values are written."""
    if in_percent(made):
        return f"{made.metric}, %", lambda value: f"{100 * value:.4g}"
    return made.metric, lambda value: f"{value:.4g}"


def _described(made: Comparison, row: Row) -> str:
    value, small = shown(made, row.mean, row.std)
    seeds = ", ".join(f"seed {seed}: {number:.4f}" for seed, number in zip(row.seeds, row.values))
    return f"{row.method}, {row.size}: {value}{f' ± {small}' if small else ''} ({seeds})"


def _dot_plot(made: Comparison, setting: str, drawn: Sequence[str], places: dict[str, int]) -> str:
    rows = [row for method in drawn if (row := made.row(method, MEAN, setting)) is not None]
    dots = [
        Dots(row.method, places[row.method], row.mean, row.std, row.values, row.best_mean, _described(made, row))
        for row in rows
    ]
    base = made.row(made.baseline, MEAN, setting) if made.baseline else None
    name, text = _axis(made)
    return figures.dots(f"mean of sizes in {setting}", dots, name, text, None if base is None else base.mean)


def _size_rows(made: Comparison, setting: str, method: str) -> list[Row]:
    found = [made.row(method, size, setting) for size in made.sizes(setting)]
    return [row for row in found if row is not None]


def _by_size(made: Comparison, setting: str, drawn: Sequence[str], places: dict[str, int]) -> str:
    sizes = made.sizes(setting)
    if len(sizes) < 2:
        return ""
    lines = [
        Line(
            method,
            places[method],
            [Point(sizes.index(r.size), r.mean, r.std, _described(made, r)) for r in _size_rows(made, setting, method)],
        )
        for method in drawn
    ]
    ticks = [(float(place), size) for place, size in enumerate(sizes)]
    return figures.lines(f"{made.metric} by size in {setting}", lines, "size", *_axis(made), x_ticks=ticks, apart=True)


def _by_cost(made: Comparison, setting: str, drawn: Sequence[str], places: dict[str, int]) -> str:
    lines = []
    for method in drawn:
        rows = sorted((r for r in _size_rows(made, setting, method) if r.bytes), key=lambda row: row.bytes or 0)
        points = [
            Point(float(r.bytes or 0), r.mean, r.std, f"{_described(made, r)}; {size_bytes(r.bytes)}") for r in rows
        ]
        lines.append(Line(method, places[method], points))
    costs = sorted(point.x for line in lines for point in line.points)
    if not costs or costs[0] == costs[-1]:
        return ""
    ticks = [(value, size_bytes(value)) for value in _decades(costs[0], costs[-1])]
    title = f"{made.metric} by traffic in {setting}"
    return figures.lines(title, lines, "bytes, logarithmic", *_axis(made), x_ticks=ticks, log=True)


def _decades(low: float, high: float) -> list[float]:
    """Round numbers between two on a logarithmic axis.

    >>> _decades(1500, 40000)
    [2000.0, 5000.0, 10000.0, 20000.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first < 4 else (1,)
    found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return [value for value in found if low <= value <= high]


def _curves(made: Comparison, setting: str, drawn: Sequence[str], places: dict[str, int]) -> str:
    lines = []
    for method in drawn:
        by_round: dict[int, list[float]] = {}
        for outcome in made.outcomes:
            if (outcome.setting, outcome.label) == (setting, method):
                for number, value in outcome.mean_curve:
                    by_round.setdefault(number, []).append(value)
        points = []
        for number, values in sorted(by_round.items()):
            own = spread(values)
            text, small = shown(made, own.mean, own.std)
            points.append(
                Point(number, own.mean, own.std, f"{method}, round {number}: {text}{f' ± {small}' if small else ''}")
            )
        lines.append(Line(method, places[method], points))
    if max(len(line.points) for line in lines) < 2:
        return ""
    return figures.lines(f"{made.metric} over the rounds in {setting}", lines, "round", *_axis(made))


def _main_table(made: Comparison, setting: str, drawn: Sequence[str]) -> str:
    """The metric by method and size; the best of a column is bold."""
    columns = [*made.sizes(setting), MEAN]
    gaps = {(d.method, d.size): d for d in made.differences if d.setting == setting}
    heads = ["method", *columns, "best round", *([f"to {made.baseline}"] if gaps else [])]
    tops = {size: _top(made, setting, size) for size in columns}
    rows = []
    for method in drawn:
        cells = []
        for size in columns:
            row = made.row(method, size, setting)
            cells.append(_cell(made, row, "n top" if row and row.mean == tops[size] else "n"))
        whole = made.row(method, MEAN, setting)
        assert whole is not None
        cells.append(_td(*shown(made, whole.best_mean, whole.best_std), "n", str(whole.best_mean)))
        if gaps:
            gap = gaps.get((method, MEAN))
            value, small = ("", "") if gap is None else shown(made, gap.mean, gap.std, sign=True)
            cells.append(_td(value.replace("-", "−"), small, "n", "" if gap is None else str(gap.mean)))
        rows.append(_tr(method, cells))
    unit = " in percent" if in_percent(made) else ""
    over = f" Mean ± standard deviation over {times(len(made.seeds), 'seed')}." if len(made.seeds) > 1 else ""
    better = "higher" if made.higher_is_better else "lower"
    note = (
        f"{made.metric}{unit} on {_judged(made)} after the last round; {better} is better, the best of a column is "
        f"bold.{over} Best round: the mean of sizes at each run’s best evaluation."
    )
    note += f" To {made.baseline}: differences of the mean of sizes, seed by seed." if gaps else ""
    return _table(heads, rows, note, "compare.csv")


def _top(made: Comparison, setting: str, size: str) -> float | None:
    means = [row.mean for method in made.methods if (row := made.row(method, size, setting)) is not None]
    finite = [mean for mean in means if math.isfinite(mean)]
    return None if not finite else max(finite) if made.higher_is_better else min(finite)


def _equal_cost(made: Comparison, setting: str, drawn: Sequence[str]) -> str:
    """The metric at equal cost, a table per unit."""
    parts = []
    for unit in EQUAL_UNITS:
        entries = {(e.method, e.cost): e for e in made.equal_cost if (e.setting, e.unit) == (setting, unit)}
        costs = sorted({cost for _, cost in entries})
        known = [entry for entry in entries.values() if entry.mean is not None]
        if not costs or len({entry.method for entry in known}) < 2:
            continue
        words, text = _UNITS[unit]
        rows = []
        for method in drawn:
            own = [entries.get((method, cost)) for cost in costs]
            cells = [
                _td(MISSING, "", "n", "") if e is None else _td(*shown(made, e.mean, e.std), "n", str(e.mean))
                for e in own
            ]
            rows.append(_tr(method, cells))
        note = f"At equal {words}: on straight lines between a method’s own sizes, and no value outside them."
        table = _table(["method", *map(text, costs)], rows, note, "compare/equal-cost.csv")
        parts.append(table if unit == EQUAL_UNITS[0] else _folded(f"At equal {words}", table))
    return f"<h3 class='part'>At equal cost</h3>{''.join(parts)}" if parts else ""


def _reached(made: Comparison, setting: str) -> str:
    entries = [entry for entry in made.reached if entry.setting == setting and entry.size == MEAN]
    if not entries or made.target is None:
        return ""
    rows = []
    for entry in entries:
        cells = [_td(f"{entry.reached} of {entry.seeds}", "", "n", "")]
        cells.append(_td(MISSING if entry.rounds is None else f"{entry.rounds:.0f}", "", "n", str(entry.rounds)))
        cells.append(_td(size_bytes(entry.bytes), "", "n", str(entry.bytes)))
        cells.append(_td(count(entry.training_macs), "", "n", str(entry.training_macs)))
        rows.append(_tr(entry.method, cells))
    target = _axis(made)[1](made.target)
    note = f"Until the first evaluation at which the mean of sizes is {target}: all clients together, mean over seeds."
    heads = ["method", "reached by", "rounds", "bytes", "training multiply-adds"]
    return f"<h3 class='part'>Cost to reach {target}</h3>" + _table(heads, rows, note, "compare/target.csv")


def _costs(made: Comparison, setting: str, drawn: Sequence[str]) -> str:
    """What a client of each size costs, folded."""
    heads = ["method", "size", "parameters", "MACs", "training MACs", "activations", "bytes", "inference"]
    rows = []
    for method in drawn:
        for row in _size_rows(made, setting, method):
            values = [(row.parameters, count), (row.macs, count), (row.training_macs, count)]
            values += [(row.activation_bytes, size_bytes), (row.bytes, size_bytes), (row.inference_bytes, size_bytes)]
            cells = [_td(row.size, "", "", "")] + [_td(text(value), "", "n", str(value)) for value, text in values]
            rows.append(_tr(method, cells))
    note = (
        "Of one client: MACs of a forward pass of the finished network and training MACs are per sample, activations "
        "of a step, bytes both ways in a round, inference: the finished network as it ships."
    )
    table = _table(heads, rows, note, "compare.csv")
    return _folded("What each size costs", table)


def _folded(title: str, content: str) -> str:
    return f'<details class="card"><summary>{html.escape(title)}</summary>{content}</details>\n'


def _statements(made: Comparison) -> str:
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in made.statements)
    return (
        '<section id="equal">\n<h2>What was equal, and what was not</h2>\n'
        f'<div class="card"><ul class="equal">{lines}</ul></div>\n</section>'
    )


def _runs(made: Comparison) -> str:
    """Links to the runs and their reports, and what is not finished."""
    rows = []
    for outcome in made.outcomes:
        place = os.path.relpath(outcome.directory, made.directory)
        link = f"{place}/report.html" if (outcome.directory / "report.html").is_file() else place
        tuned = ", ".join(f"{key} = {value}" for key, value in outcome.tuned.items())
        name = f'<a href="{html.escape(quote(Path(link).as_posix()))}">{html.escape(outcome.path)}</a>'
        last = shown(made, outcome.mean_curve[-1][1], None)[0]
        rows.append(f'<tr><th scope="row">{name}</th>{_td(last, "", "n", "")}{_td(tuned, "", "", "")}</tr>')
    heads = ["run", MEAN, "tuned"]
    parts = [_table(heads, rows, "Each run has its own folder, and its report there.", "compare/runs.csv")]
    open_ = [f"{path}: {text.strip().splitlines()[-1]}" for path, text in made.failures.items()]
    open_ += [f"{path}: not finished" for path in made.missing]
    if open_:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in open_)
        parts.append(f'<div class="card"><ul class="equal">{lines}</ul></div>')
    links = " · ".join(f'<a href="compare/{name}.csv">{name}</a>' for name, _ in tables(made))
    more = f'<p class="note">Further tables as CSV: {links}.</p>'
    folded = f"<details><summary>{times(len(made.outcomes), 'run')}</summary>{''.join(parts)}</details>{more}"
    return f'<section id="runs">\n<h2>Runs</h2>\n<div class="card">{folded}</div>\n</section>'


def _cell(made: Comparison, row: Row | None, kind: str) -> str:
    if row is None:
        return _td("", "", "n", "")
    return _td(*shown(made, row.mean, row.std), kind, _described(made, row))


def _td(value: str, small: str, kind: str, title: str) -> str:
    about = f' title="{html.escape(title)}"' if title not in ("", "None") else ""
    std = f' <span class="std">± {html.escape(small)}</span>' if small else ""
    return f'<td class="{kind}"{about}>{html.escape(value)}{std}</td>'


def _tr(name: str, cells: Sequence[str]) -> str:
    return f'<tr><th scope="row">{html.escape(name)}</th>{"".join(cells)}</tr>\n'


def _table(heads: Sequence[str], rows: Sequence[str], note: str, file: str) -> str:
    head = "".join(
        f'<th scope="col" class="{"n" if place else ""}">{html.escape(text)}</th>' for place, text in enumerate(heads)
    )
    link = f'<a class="csv" href="{file}" download="">CSV</a>'
    return (
        f'<div class="card">\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{"".join(rows)}'
        f'</tbody>\n</table></div>\n<div class="head"><p class="note">{html.escape(note)}</p>{link}</div>\n</div>\n'
    )
