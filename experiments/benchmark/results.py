"""Writes every table and figure of the benchmark that the pages show, from `results/*.csv`.

    python experiments/benchmark/results.py

A page names a table by a mark such as `<!-- benchmark: cifar, 3 classes -->`; what stands between it and
`<!-- end of benchmark -->` is written anew. `experiments/gather.py` writes the CSV files.
"""

from __future__ import annotations

import csv
import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "how-to-choose.md", HERE / "README.md")
BOUND = "FedAvg, each width"
WEAKEST = "FedAvg, weakest width"
SLICE = "heterofl"  # trains the plain slice of every width, what others' costs are held against
MARKED = "†"
DEAR = 1.5  # times the slice's training MACs: a cell above that is marked, and never counts as the best
TITLES = {
    "fashion": "Fashion-MNIST",
    "cifar": "CIFAR-10, 16 x 16",
    "digits": "Digits",
    "confirmation": "Confirmation",
}
PAPERS = ", papers"  # ends the name of a setting in which every method has the tricks of its own paper
OURS = "ladder"
GAP = "gap"  # a mark of this name gets the table of what our own method leaves of the way to the bound
COMPRESSED = " updates"  # ends the label of a method whose updates are compressed: a form of it, no method of its own
COMPOSED = "flanc"  # the method whose bytes the others are held against
BYTES = "bytes"  # a mark of this name gets the table of what methods reach at those bytes
LEADERS = "leaders"  # a mark of this name, or followed by PAPERS, gets the table of who leads
MARK = re.compile(r"(<!-- benchmark: (\w+), (.+?) -->\n)(.*?)(<!-- end of benchmark -->)", re.DOTALL)


@dataclass(frozen=True)
class Result:
    """One cell at one size, as a line of the CSV."""

    setting: str
    method: str
    seed: int
    size: str
    accuracy: float
    best: float
    parameters: int
    training_macs: int
    bytes: int


# Reading


def read(name: str) -> list[Result]:
    """All lines of a CSV but those of sizes that no client trains, which have no costs."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return [
            Result(
                row["setting"],
                row["method"],
                int(row["seed"]),
                row["size"],
                float(row["accuracy"]),
                float(row["best"]),
                *(int(row[key]) for key in ("parameters", "training_macs", "bytes")),
            )
            for row in csv.DictReader(file)
            if row["bytes"]
        ]


def plain(results: Sequence[Result]) -> list[Result]:
    """All but those of methods whose updates are compressed."""
    return [result for result in results if not result.method.endswith(COMPRESSED)]


def methods(results: Sequence[Result]) -> list[str]:
    """Their labels: the bound first, then the small baselines, then by the mean over all sizes, best first."""
    labels = {result.method for result in results}
    fixed = [
        label for label in (BOUND, WEAKEST, *sorted(label for label in labels if "strong" in label)) if label in labels
    ]
    return fixed + sorted(labels - set(fixed), key=lambda label: (-mean(_means_by_seed(results, label)), label))


def sizes(results: Sequence[Result]) -> list[str]:
    return sorted({result.size for result in results}, key=float)


def values(results: Sequence[Result], method: str, size: str) -> list[float]:
    """The accuracies of a method at a size in percent, one per seed."""
    own = [result for result in results if (result.method, result.size) == (method, size)]
    return [100 * result.accuracy for result in sorted(own, key=lambda result: result.seed)]


def _means_by_seed(results: Sequence[Result], method: str) -> list[float]:
    own = [result for result in results if result.method == method]
    seeds = sorted({result.seed for result in own})
    return [mean(100 * result.accuracy for result in own if result.seed == seed) for seed in seeds]


# Tables


def table(name: str, setting: str) -> str:
    """Accuracy of every method at every size, and what its smallest and largest size cost a client."""
    results = [result for result in read(name) if result.setting == setting]
    columns = sizes(results)
    real = [method for method in methods(results) if method != BOUND]
    tops = {
        size: max(
            mean(found)
            for method in real
            if (found := values(results, method, size)) and not dear(results, method, size)
        )
        for size in columns
    }
    seeds = sorted({result.seed for result in results})
    ends = (columns[0], columns[-1])
    costs = " | ".join(f"bytes, MACs at {end}" for end in ends)
    lines = [
        f"| {TITLES[name]}, {setting} | {' | '.join(columns)} | {costs} |",
        "| --- |" + " ---: |" * (len(columns) + 2),
    ]
    for method in methods(results):
        cells = [_cell(results, method, size, tops[size], len(seeds)) for size in columns]
        lines.append(
            f"| {_shown(method)} | {' | '.join(cells)} | {' | '.join(_cost(results, method, end) for end in ends)} |"
        )
    about = [
        f"Test accuracy in % after the last round, mean ± standard deviation over seeds {_listed(seeds)}.",
        "Bytes: a client of that size, down and up in a round. MACs: its training, a sample.",
    ]
    if any(MARKED in line for line in lines):
        about.append(
            f"{MARKED}: training at this size costs more than {DEAR} times the MACs of `{SLICE}`; never in bold."
        )
    return "\n".join([*lines, "", " ".join(about), ""])


def leaders(name: str, tricks: str) -> str:
    """Who is best at every size of every setting with equal tricks, or with those of each method's paper."""
    found = leading(name, tricks)
    places = max(map(len, found.values()))
    lines = [f"| {TITLES[name]} | smallest size |" + " |" * (places - 2) + " largest size |"]
    lines.append("| --- |" + " --- |" * places)
    for setting, by_size in found.items():
        first, *between, last = (f"{size}: {_ranking(level)}" for size, level in by_size.items())
        between += [""] * (places - 2 - len(between))
        lines.append(f"| {' | '.join([setting.removesuffix(PAPERS), first, *between, last])} |")
    counted = ", ".join(f"{_shown(method)} {times}" for method, times in counts(found).most_common())
    about = [
        "The best mean accuracy in %, then the methods that are level with it: what they are behind, seed by seed, has",
        "a mean of at most its standard deviation. Left out: the bound, and what costs a client more than",
        f"{DEAR} times the training MACs of `{SLICE}`. Best or level, of {sum(map(len, found.values()))}: {counted}.",
    ]
    return "\n".join([*lines, "", " ".join(about), ""])


def leading(name: str, tricks: str) -> dict[str, dict[str, dict[str, float]]]:
    """By setting and size the methods that lead, the best first, with their means."""
    settings: dict[str, list[Result]] = {}
    for result in plain(read(name)):
        if result.setting.endswith(PAPERS) == (tricks == "papers"):
            settings.setdefault(result.setting, []).append(result)
    return {setting: {size: _level_methods(own, size) for size in sizes(own)} for setting, own in settings.items()}


def counts(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Counter[str]:
    """At how many sizes of all settings each method leads."""
    return Counter(method for by_size in found.values() for level in by_size.values() for method in level)


def gap(name: str) -> str:
    """For every size of every setting with equal tricks: how much our own method closes of the gap to the bound."""
    results = [result for result in plain(read(name)) if not result.setting.endswith(PAPERS)]
    lines = [
        "| setting | size | bound | best other | ours | behind the bound | ahead of the best other | gap closed |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    found = [
        (setting, size, *_around(results, setting, size))
        for setting in dict.fromkeys(result.setting for result in results)
        for size in sizes([result for result in results if result.setting == setting])
    ]
    for setting, size, top, best, other, own in found:
        lines.append(_gap_line(setting, size, top, f"{_shown(best)} {other:.1f}", other, own))
    for size in sizes(results):
        tops, others, owns = zip(*((top, other, own) for _, at, top, _, other, own in found if at == size), strict=True)
        if len(owns) > 1:
            other = mean(others)
            lines.append(_gap_line(f"mean of {len(owns)}", size, mean(tops), f"{other:.1f}", other, mean(owns)))
    about = [
        f"Means over the seeds, in %. Ours: `{OURS}`. Left out: methods that cost a client more than {DEAR} times the",
        f"training MACs of `{SLICE}`, and FedAvg on strong clients alone, where a round has no other clients.",
        "The bar is half of the gap between the best other and the bound, in the mean over settings.",
    ]
    return "\n".join([*lines, "", " ".join(about), ""])


def equal_bytes(name: str) -> str:
    """What methods reach at the bytes of FLANC's sizes, in the settings where updates are compressed too."""
    results = read(name)
    compressed = [result for result in results if result.method.endswith(COMPRESSED)]
    shown = (COMPOSED, "splitmix", SLICE, OURS, *dict.fromkeys(result.method for result in compressed))
    lines = []
    for setting in dict.fromkeys(result.setting for result in compressed):
        own = [result for result in results if result.setting == setting]
        sent = [own_bytes for own_bytes, _ in curve(own, COMPOSED)]
        lines.append(f"| {setting} | {' | '.join(f'{place / 1e3:.0f} kB' for place in sent)} |")
        lines += [f"| {_shown(method)} | {' | '.join(_at(curve(own, method), sent))} |" for method in shown]
    places = len({result.size for result in results if result.setting == compressed[0].setting})
    head = ["| at bytes of a client and round |" + " |" * places, "| --- |" + " ---: |" * places]
    about = [
        f"Test accuracy in %, means over the seeds, at the bytes that a client of each of `{COMPOSED}`'s sizes sends",
        "and gets in a round, on straight lines between a method's own sizes. Empty: outside of these sizes.",
    ]
    return "\n".join([*head, *lines, "", " ".join(about), ""])


def curve(results: Sequence[Result], method: str) -> list[tuple[int, float]]:
    """A method's sizes as bytes of a client in a round, and mean accuracy."""
    sent = {result.size: result.bytes for result in results if result.method == method}
    return sorted((sent[size], mean(values(results, method, size))) for size in sent)


def _at(points: Sequence[tuple[int, float]], places: Sequence[int]) -> list[str]:
    """What a curve has at each place, as text; nothing outside of its range."""

    def read_at(place: int) -> str:
        for (low, one), (high, two) in pairwise(points):
            if low <= place <= high:
                return f"{one + (two - one) * (place - low) / (high - low):.1f}"
        return ""

    return [read_at(place) for place in places]


def _around(results: Sequence[Result], setting: str, size: str) -> tuple[float, str, float, float]:
    """The bound, the best other method and its accuracy, and that of ours."""
    at = [result for result in results if (result.setting, result.size) == (setting, size)]
    ranked = [
        (mean(values(at, method, size)), method)
        for method in methods(at)
        if method not in (BOUND, OURS) and "strong" not in method and not dear(at, method, size)
    ]
    other, best = max(ranked, key=lambda entry: entry[0])
    return mean(values(at, BOUND, size)), best, other, mean(values(at, OURS, size))


def _gap_line(setting: str, size: str, top: float, best: str, other: float, own: float) -> str:
    closed = f"{100 * (own - other) / (top - other):.0f} %" if top - other >= 0.05 else "no gap"
    return f"| {setting} | {size} | {top:.1f} | {best} | {own:.1f} | {top - own:.1f} | {own - other:+.1f} | {closed} |"


def _level_methods(results: Sequence[Result], size: str) -> dict[str, float]:
    """The best method at a size and those that are level with it, with their means. What lacks a seed has no place."""
    found = {
        method: own
        for method in methods(results)
        if method != BOUND and (own := values(results, method, size)) and not dear(results, method, size)
    }
    seeds = max(map(len, found.values()))
    ranked = sorted((-mean(own), method) for method, own in found.items() if len(own) == seeds)
    best = found[ranked[0][1]]
    return {method: -top for top, method in ranked if _level(best, found[method])}


def _ranking(level: Mapping[str, float]) -> str:
    (best, top), *others = level.items()
    return f"{_shown(best)} {top:.1f}" + (f"; {', '.join(_shown(method) for method, _ in others)}" if others else "")


def _level(best: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the lead of the best over another method is within the spread of their differences by seed."""
    behind = [one - two for one, two in zip(best, other, strict=True)]
    return mean(behind) <= (stdev(behind) if len(behind) > 1 else 0.0)


def dear(results: Sequence[Result], method: str, size: str) -> bool:
    """Whether training at a size costs a client far more than the plain slice of that size."""
    costs = {result.method: result.training_macs for result in results if result.size == size}
    return method in costs and SLICE in costs and costs[method] > DEAR * costs[SLICE]


def _cell(results: Sequence[Result], method: str, size: str, top: float, seeds: int) -> str:
    found = values(results, method, size)
    if not found:
        return ""
    text = f"{mean(found):.1f}" + (f" ± {stdev(found):.1f}" if len(found) > 1 else "")
    if method != BOUND and dear(results, method, size):
        text += f" {MARKED}"
    elif method != BOUND and mean(found) == top:
        text = f"**{text}**"
    return text if len(found) == seeds else f"{text} ({len(found)} of {seeds} seeds)"


def _cost(results: Sequence[Result], method: str, size: str) -> str:
    own = [result for result in results if (result.method, result.size) == (method, size)]
    return f"{own[0].bytes / 1e3:,.0f} kB, {own[0].training_macs / 1e6:.2f} M" if own else ""


def _shown(method: str) -> str:
    return method if " " in method else f"`{method}`"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


# The figure

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 440, 340, 44, 34, 42
NOT_DRAWN = "fedrolex"  # nobody trains its smaller sizes as such, and they would stretch the axis far down
LIGHT = ["#0072b2", "#c65200", "#00815e", "#b0558a", "#8a6d00", "#2f7fb5", "#6b4c9a", "#a33b3b"]
DARK = ["#5fb0e8", "#f08a4b", "#3fcf9f", "#e59cc6", "#e3c04a", "#8fd0f7", "#b59ae0", "#ef8f8f"]


def figure(name: str, chosen: Sequence[str]) -> str:
    """Accuracy over what training costs a client, a panel per setting, light and dark by the reader's preference."""
    results = [result for result in plain(read(name)) if result.method != NOT_DRAWN]
    alike = _alike([result for result in results if result.setting in chosen])
    labels = list(alike)
    columns = 2 if len(chosen) == 1 else 3  # of the legend
    height = HEIGHT + 20 * -(-(len(labels) + 2) // columns) + 8
    width = WIDTH * len(chosen)
    parts = [_style(len(labels))]
    for place, setting in enumerate(chosen):
        own = [result for result in results if result.setting == setting]
        parts.append(f'<g transform="translate({WIDTH * place} 0)">{_panel(own, setting, labels)}</g>')
    parts.append(_legend([*map(", ".join, alike.values()), BOUND, WEAKEST], width, columns))
    title = html.escape(f"{TITLES[name]}: accuracy over training MACs")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{title}"><title>{title}</title>{"".join(parts)}</svg>\n'
    )


def _alike(results: Sequence[Result]) -> dict[str, list[str]]:
    """The methods that get a line, each with all methods that have its very accuracies, itself first."""
    lines: dict[tuple[object, ...], list[str]] = {}
    for label in methods(results):
        own = [result for result in results if result.method == label]
        seen = tuple(sorted((result.setting, result.size, result.seed, result.accuracy) for result in own))
        if label not in (BOUND, WEAKEST) and "strong" not in label:
            lines.setdefault(seen, []).append(label)
    return {labels[0]: labels for labels in lines.values()}


def _style(count: int) -> str:
    def colours(palette: Sequence[str], ink: str, grid: str) -> str:
        lines = "".join(
            f".m{number}{{stroke:{palette[number % 8]};fill:{palette[number % 8]}}}" for number in range(count)
        )
        return f"text{{fill:{ink}}}.grid{{stroke:{grid}}}.bound,.weakest{{stroke:{ink};fill:{ink}}}{lines}"

    fixed = "text{font:12px system-ui,sans-serif;stroke:none}polyline{fill:none!important;stroke-width:2}"
    fixed += ".bound,.dashed{stroke-dasharray:6 4}.weakest{stroke-dasharray:2 3}.bar{stroke-width:1.2}"
    dark = f"@media(prefers-color-scheme:dark){{{colours(DARK, '#c9d1d9', '#343b44')}}}"
    return f"<style>{fixed}{colours(LIGHT, '#424a53', '#e4e6e9')}{dark}</style>"


def _panel(results: Sequence[Result], setting: str, labels: Sequence[str]) -> str:
    columns = sizes(results)
    every = [result for result in results if "strong" not in result.method]
    means = [mean(found) for result in every if (found := values(results, result.method, result.size))]
    low, high = 2 * int(min(means) / 2), 2 * int(max(means) / 2 + 1)
    macs = {(result.method, result.size): result.training_macs for result in every}
    # The bound stands where its networks alone would: a client that trained all of them would pay for their sum.
    macs |= {(BOUND, size): macs[SLICE, size] for size in columns}
    least, most = math.log(min(macs.values())), math.log(max(macs.values()))

    def x_of(cost: float) -> float:
        return LEFT + 16 + (WIDTH - LEFT - 52) * (math.log(cost) - least) / ((most - least) or 1)

    def y_of(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    def line(method: str, look: str) -> str:
        points = [(x_of(macs[method, size]), own) for size in columns if (own := values(results, method, size))]
        return _line([(x, *(y_of(max(value, low)) for value in _spread(own))) for x, own in sorted(points)], look)

    step = 2 if high - low <= 12 else 5 if high - low <= 30 else 10
    parts = [f'<text x="{LEFT}" y="18" style="font-weight:600">{html.escape(setting)}</text>']
    for value in range(low - low % step + (step if low % step else 0), high + 1, step):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(value) + 4:.1f}" text-anchor="end">{value} %</text>')
    for size in columns:
        x, cost = x_of(macs[SLICE, size]), macs[SLICE, size]
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle">{_short(cost)}</text>')
    words = f"training MACs of a client, a sample (lines: widths {', '.join(columns)})"
    parts.append(f'<text x="{WIDTH / 2:.1f}" y="{HEIGHT - 4}" text-anchor="middle">{words}</text>')
    parts.append(line(BOUND, "bound"))
    if weakest := values(results, WEAKEST, columns[0]):
        x, y = x_of(macs[WEAKEST, columns[0]]), y_of(mean(weakest))
        parts.append(f'<line class="weakest" x1="{x:.1f}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts += [line(label, _class(number)) for number, label in enumerate(labels)]
    return "".join(parts)


def _short(macs: int) -> str:
    return f"{macs / 1e6:.2g} M" if macs >= 1e6 else f"{macs / 1e3:.0f} k"


def _spread(found: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and a standard deviation below and above it."""
    width = stdev(found) if len(found) > 1 else 0.0
    return mean(found), mean(found) - width, mean(found) + width


def _class(number: int) -> str:
    return f"m{number}" + (" dashed" if number >= len(LIGHT) else "")


def _line(points: Sequence[tuple[float, float, float, float]], look: str) -> str:
    """A method's means, with a bar of one standard deviation over the seeds."""
    course = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in points)
    bars = [
        f'<line class="{look} bar" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
        for x, _, low, high in points
        if low != high
    ]
    dots = [f'<circle class="{look}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y, _, _ in points]
    return f'<g><polyline class="{look}" points="{course}"/>{"".join(bars)}{"".join(dots)}</g>' if points else ""


def _legend(labels: Sequence[str], width: int, columns: int) -> str:
    looks = [*(_class(number) for number in range(len(labels) - 2)), "bound", "weakest"]
    parts = []
    for number, (label, look) in enumerate(zip(labels, looks)):
        x, y = 12 + (width - 12) / columns * (number % columns), HEIGHT + 16 + 20 * (number // columns)
        parts.append(
            f'<line class="{look}" x1="{x:.1f}" x2="{x + 22:.1f}" y1="{y - 4}" y2="{y - 4}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{x + 28:.1f}" y="{y}">{html.escape(label)}</text>')
    return "".join(parts)


# Writing


def shown(page: str) -> str:
    """The page with the tables that its marks name."""

    def made(found: re.Match[str]) -> str:
        if found[3] in (LEADERS, LEADERS + PAPERS):
            own = leaders(found[2], "papers" if found[3].endswith(PAPERS) else "equal")
        elif found[3] == GAP:
            own = gap(found[2])
        elif found[3] == BYTES:
            own = equal_bytes(found[2])
        else:
            own = table(found[2], found[3])
        return found[1] + own + found[5]

    return MARK.sub(made, page)


def write() -> None:
    """Writes every table and figure anew."""
    for page in PAGES:
        page.write_text(shown(page.read_text(encoding="utf-8")), encoding="utf-8")
    for name, settings in FIGURES.items():
        (RESULTS / f"{name}.svg").write_text(figure(name, settings), encoding="utf-8")


FIGURES: dict[str, tuple[str, ...]] = {"cifar": ("3 classes",), "fashion": ("3 classes",)}
"""By data set, the settings that its figure shows; a setting comes in once all of its cells are there."""


if __name__ == "__main__":
    write()
