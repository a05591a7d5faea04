"""What came out of a comparison: rows by size, differences to a baseline, equal cost, cost to a target."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from anysize.comparisons import fairness
from anysize.comparisons.outcomes import Outcome
from anysize.comparisons.statistics import at_cost, best, first_reached, paired, spread
from anysize.comparisons.tuning import Choice
from anysize.config.compare import CompareConfig
from anysize.errors import ConfigError, unknown
from anysize.records.directory import finite_json
from anysize.report.tables import times
from anysize.wire import Json

MEAN = "mean of sizes"
"""In place of a size's label: the mean over all sizes of a method."""

EQUAL_UNITS = ("bytes", "training_macs", "activation_bytes")
"""What may be held equal: a client's traffic in a round, its multiply-adds for a sample, what a step of it holds."""


@dataclass(frozen=True)
class Row:
    """One method at one size.

    Attributes:
        setting: the name of the setting; empty where there is one only.
        method: its label.
        size: the size's label, or "mean of sizes".
        mean: of the metric over the seeds, at the last round.
        std: the sample standard deviation over the seeds; None of a single one.
        best_mean: of the metric over the seeds, each at its best round, which is too good a figure.
        best_std: its sample standard deviation.
        seeds: of which there is a value.
        values: the metric of each of these seeds at the last round.
        best_values: at the best round.
        parameters: what a client of that size trains and sends.
        macs: multiply-adds of one forward pass of the finished network, per sample.
        training_macs: multiply-adds of a loss and its backward pass, per sample.
        activation_bytes: what a training step holds.
        bytes_down: the message to a client in a round.
        bytes_up: the message back.
        inference_bytes: parameters and buffers of the finished network as it ships, batch-norm statistics included.
        nonzero_macs: multiply-adds of one forward pass whose weight is not zero.
    """

    setting: str
    method: str
    size: str
    mean: float
    std: float | None
    best_mean: float
    best_std: float | None
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    best_values: tuple[float, ...]
    parameters: int | None = None
    macs: int | None = None
    training_macs: int | None = None
    activation_bytes: int | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    inference_bytes: int | None = None
    nonzero_macs: int | None = None

    @property
    def bytes(self) -> int | None:
        """Both ways, for a client in a round."""
        return None if self.bytes_down is None or self.bytes_up is None else self.bytes_down + self.bytes_up


@dataclass(frozen=True)
class Difference:
    """How far one method is from the baseline at one size, by the differences seed by seed.

    Attributes:
        setting: the name of the setting.
        method: its label.
        size: the size's label, or "mean of sizes": each method's mean over the sizes that it has.
        mean: of the differences; above 0 the metric is larger than the baseline's.
        std: their sample standard deviation; None of a single seed.
        seeds: how many seeds both have.
    """

    setting: str
    method: str
    size: str
    mean: float
    std: float | None
    seeds: int


@dataclass(frozen=True)
class AtCost:
    """The metric of one method at a cost, between its sizes.

    Attributes:
        setting: the name of the setting.
        method: its label.
        unit: of the cost: bytes (both ways, a client in a round), training_macs (a sample), activation_bytes (a step).
        cost: in that unit.
        mean: of the metric; None below the method's cheapest size and above its dearest.
        std: the sample standard deviation over the seeds.
    """

    setting: str
    method: str
    unit: str
    cost: float
    mean: float | None
    std: float | None


@dataclass(frozen=True)
class Reached:
    """What it took a method to reach the target at one size.

    Attributes:
        setting: the name of the setting.
        method: its label.
        size: the size's label, or "mean of sizes".
        reached: how many seeds did.
        seeds: how many there are.
        rounds: until the first evaluation that reached it; the mean over the seeds, None unless all did.
        bytes: that all clients received and sent until then.
        training_macs: multiply-adds of all clients' training until then.
    """

    setting: str
    method: str
    size: str
    reached: int
    seeds: int
    rounds: float | None
    bytes: float | None
    training_macs: float | None


@dataclass(frozen=True, repr=False)
class Comparison:
    """What came out of a comparison. A prompt shows it as a small table of text, a notebook as one of HTML.

    Attributes:
        metric: the name of the figure of merit.
        higher_is_better: whether a larger metric is a better one.
        judged_on: "test", or "clients": their held-out data.
        rounds: of every run.
        seeds: that were run.
        settings: their names, as asked for; one empty name where there are none.
        methods: their labels, as asked for.
        rows: a row per setting, method and size: methods as asked for, smallest size first, then the mean of sizes.
        baseline: the label from which differences are taken, or None.
        differences: to the baseline.
        equal_cost: the metric at equal cost.
        target: the metric whose cost is told, or None.
        reached: what it took to reach it.
        statements: what was equal and what was not.
        outcomes: the runs.
        failures: why a run has failed, by its path.
        missing: paths of runs that are not finished.
        directory: where the runs are.
    """

    metric: str
    higher_is_better: bool
    judged_on: str
    rounds: int
    seeds: tuple[int, ...]
    settings: tuple[str, ...]
    methods: tuple[str, ...]
    rows: tuple[Row, ...]
    baseline: str | None
    differences: tuple[Difference, ...]
    equal_cost: tuple[AtCost, ...]
    target: float | None
    reached: tuple[Reached, ...]
    statements: tuple[str, ...]
    directory: Path
    outcomes: tuple[Outcome, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def __repr__(self) -> str:
        columns = [
            [cell.ljust(width) if place < self._names else cell.rjust(width) for cell in cells]
            for place, cells in enumerate(zip(*_lines(self)))
            for width in [max(map(len, cells))]
        ]
        lines = ["  ".join(cells).rstrip() for cells in zip(*columns)]
        return "\n  ".join([f"Comparison {self.directory}: {self._title}", *lines])

    def _repr_html_(self) -> str:
        head, *rows = [[html.escape(cell) for cell in line] for line in _lines(self)]
        top = "".join(f"<th>{cell}</th>" for cell in head)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        title = f"<b>{html.escape(str(self.directory))}</b>: {html.escape(self._title)}"
        return f"<div><p>{title}</p><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"

    @property
    def _names(self) -> int:
        """How many columns of names there are: the method, and before it the setting where there are several."""
        return 1 if self.settings == ("",) else 2

    @property
    def _title(self) -> str:
        unit = " in percent" if in_percent(self) else ""
        place = "the test set" if self.judged_on == "test" else "clients' held-out data"
        seeds = f"{'seed' if len(self.seeds) == 1 else 'seeds'} {', '.join(map(str, self.seeds))}"
        open_ = [(self.failures, "failed"), (self.missing, "not finished")]
        more = [f"{len(paths)} {state}" for paths, state in open_ if paths]
        return ", ".join([f"{self.metric}{unit} on {place} after {times(self.rounds, 'round')}", seeds, *more])

    def averages(self, setting: str | None = None) -> dict[str, tuple[float, float | None]]:
        """Per method, the metric's mean over its sizes: mean and sample deviation over the seeds; first setting."""
        where = self.settings[0] if setting is None else setting
        own = [row for row in self.rows if row.setting == where and row.size == MEAN]
        return {row.method: (row.mean, row.std) for row in own}

    def row(self, method: str, size: str = MEAN, setting: str | None = None) -> Row | None:
        """A row, or None where there is none; by default of the first setting."""
        where = self.settings[0] if setting is None else setting
        found = (row for row in self.rows if (row.setting, row.method, row.size) == (where, method, size))
        return next(found, None)

    def sizes(self, setting: str) -> list[str]:
        """The labels of all methods' sizes in a setting, smallest first."""
        labels = dict.fromkeys(row.size for row in self.rows if row.setting == setting and row.size != MEAN)
        return sorted(labels, key=lambda label: _order(self.rows, label))

    def to_json(self) -> Json:
        """As one JSON object; numbers that are not finite are null."""
        about: Json = {
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "judged_on": self.judged_on,
            "rounds": self.rounds,
            "seeds": list(self.seeds),
            "settings": list(self.settings),
            "methods": list(self.methods),
            "averages": {row.method: {"mean": row.mean, "std": row.std} for row in self.rows if self._is_average(row)},
            "rows": [asdict(row) for row in self.rows],
            "baseline": self.baseline,
            "differences": [asdict(entry) for entry in self.differences],
            "equal_cost": [asdict(entry) for entry in self.equal_cost],
            "target": self.target,
            "reached": [asdict(entry) for entry in self.reached],
            "statements": list(self.statements),
            "failures": dict(self.failures),
            "missing": list(self.missing),
            "cells": [_cell_json(outcome) for outcome in self.outcomes],
        }
        found: Json = finite_json(about)
        return found

    def _is_average(self, row: Row) -> bool:
        return row.size == MEAN and row.setting == self.settings[0]


def in_percent(made: Comparison) -> bool:
    """Whether the metric is a fraction that people read in percent."""
    return "accuracy" in made.metric and all(0 <= row.mean <= 1 for row in made.rows if math.isfinite(row.mean))


def shown(made: Comparison, mean: float | None, std: float | None, sign: bool = False) -> tuple[str, str]:
    """A value and its spread as they are printed: accuracies in percent with one decimal, others with four digits."""
    if mean is None or not math.isfinite(mean):
        return "–", ""
    percent = in_percent(made)
    form = f"{'+' if sign else ''}.{1 if percent else 4}f"
    factor = 100.0 if percent else 1.0
    small = "" if std is None or not math.isfinite(std) else f"{std * factor:{form.lstrip('+')}}"
    return f"{mean * factor:{form}}", small


def _lines(made: Comparison) -> list[list[str]]:
    """The metric by setting, method and size as cells of a table, under a line of headings."""
    sizes = [*dict.fromkeys(size for setting in made.settings for size in made.sizes(setting)), MEAN]
    lines = [[*("setting", "method")[-made._names :], *map(_short, sizes)]]
    for setting, method in ((setting, method) for setting in made.settings for method in made.methods):
        rows = [made.row(method, size, setting) for size in sizes]
        if any(rows):
            values = [("", "") if row is None else shown(made, row.mean, row.std) for row in rows]
            names = [_short(name) for name in (setting, method)[-made._names :]]
            lines.append([*names, *(f"{value} ± {small}" if small else value for value, small in values)])
    return lines


def _short(name: str) -> str:
    """The name in one line of at most 40 signs."""
    line = " ".join(name.split())
    return line if len(line) <= 40 else f"{line[:39]}…"


def _cell_json(outcome: Outcome) -> Json:
    about = {"path": outcome.path, "setting": outcome.setting, "method": outcome.label, "seed": outcome.seed}
    spent = list(outcome.spent.values())[-1]
    curves = {label: [list(point) for point in curve] for label, curve in outcome.curves.items()}
    return about | {"tuned": dict(outcome.tuned), "spent": spent, "curves": curves}


def tabulate(
    outcomes: Sequence[Outcome],
    asked: CompareConfig,
    directory: Path,
    choices: Mapping[tuple[str, str], Choice] | None = None,
    failures: Mapping[str, str] | None = None,
    missing: Sequence[str] = (),
) -> Comparison:
    """The comparison of finished runs.

    Args:
        outcomes: the runs.
        asked: baseline, target, and the order of methods, settings and seeds.
        directory: where the comparison is.
        choices: what was tuned, by setting and label.
        failures: errors of runs, by their path.
        missing: paths of runs that are not finished.
    """
    if not outcomes:
        listed = "".join(f"\n{path}: {text}" for path, text in (failures or {}).items())
        raise ConfigError(f"no run is finished, so there is nothing to compare{listed}")
    _check_comparable(outcomes)
    first = outcomes[0]
    settings = tuple(_ordered((outcome.setting for outcome in outcomes), asked.settings))
    methods = tuple(_ordered((outcome.label for outcome in outcomes), asked.labels))
    seeds = tuple(_ordered((outcome.seed for outcome in outcomes), asked.seeds))
    if asked.baseline is not None and asked.baseline not in methods and not (failures or missing):
        raise ConfigError(unknown("baseline", asked.baseline, methods))
    groups = {
        (setting, method): sorted(
            (o for o in outcomes if (o.setting, o.label) == (setting, method)), key=lambda o: seeds.index(o.seed)
        )
        for setting in settings
        for method in methods
    }
    groups = {key: runs for key, runs in groups.items() if runs}
    rows = [row for key, runs in groups.items() for row in _rows(key, runs)]
    return Comparison(
        metric=first.metric,
        higher_is_better=first.higher_is_better,
        judged_on=first.judged_on,
        rounds=first.config.rounds,
        seeds=seeds,
        settings=settings,
        methods=methods,
        rows=tuple(rows),
        baseline=asked.baseline,
        differences=tuple(_differences(rows, asked.baseline)),
        equal_cost=tuple(_equal_cost(rows, settings, methods, asked.baseline)),
        target=asked.target,
        reached=tuple(_reached(groups, asked.target)),
        statements=tuple(fairness.statements(outcomes, choices or {})),
        outcomes=tuple(run for runs in groups.values() for run in runs),
        failures=dict(failures or {}),
        missing=tuple(missing),
        directory=directory,
    )


def _check_comparable(outcomes: Sequence[Outcome]) -> None:
    """Refuses runs whose figures are of different kinds, and several runs in one place of the table."""
    first, problems = outcomes[0], []
    for outcome in outcomes:
        if (outcome.metric, outcome.judged_on) != (first.metric, first.judged_on):
            problems.append(
                f"{outcome.path} has {outcome.metric} on {outcome.judged_on}, {first.path} {first.metric} on "
                f"{first.judged_on}; compare runs of one kind"
            )
    places: dict[tuple[str, str, int], str] = {}
    for outcome in outcomes:
        place = (outcome.setting, outcome.label, outcome.seed)
        if place in places:
            problems.append(f"{outcome.path} and {places[place]} are both {outcome.label} with seed {outcome.seed}")
        places[place] = outcome.path
    if problems:
        raise ConfigError("\n".join(problems))


def _rows(key: tuple[str, str], runs: Sequence[Outcome]) -> list[Row]:
    """A row for each size that any of the runs has, and one for their mean."""
    labels = list(dict.fromkeys(label for run in runs for label in run.curves))
    found = [
        _row(key, label, [run for run in runs if label in run.curves], lambda run, label=label: run.curves[label])  # type: ignore[misc]
        for label in labels
    ]
    return [*found, _row(key, MEAN, runs, lambda run: run.mean_curve)]


def _row(
    key: tuple[str, str], size: str, runs: Sequence[Outcome], curve: Callable[[Outcome], list[tuple[int, float]]]
) -> Row:
    last = tuple(curve(run)[-1][1] for run in runs)
    top = tuple(best(curve(run), run.higher_is_better)[1] for run in runs)
    final, peak = spread(last), spread(top)
    costs: dict[str, Any] = dict(runs[0].costs.get(size, {}))  # none for the mean of sizes
    seeds = tuple(run.seed for run in runs)
    return Row(*key, size, final.mean, final.std, peak.mean, peak.std, seeds, last, top, **costs)


def _by_seed(row: Row) -> dict[int, float]:
    return dict(zip(row.seeds, row.values))


def _differences(rows: Sequence[Row], baseline: str | None) -> list[Difference]:
    """Every other row's difference to the baseline's row of the same size, where it has one."""
    against = {(row.setting, row.size): row for row in rows if row.method == baseline}
    found = []
    for row in rows:
        base = against.get((row.setting, row.size))
        if base is None or row.method == baseline:
            continue
        gap = paired(_by_seed(row), _by_seed(base))
        if gap.count:
            found.append(Difference(row.setting, row.method, row.size, gap.mean, gap.std, gap.count))
    return found


def _equal_cost(
    rows: Sequence[Row], settings: Sequence[str], methods: Sequence[str], baseline: str | None
) -> list[AtCost]:
    """Every method at the costs of the baseline's sizes, or of the first method with the most sizes."""
    found = []
    for setting in settings:
        own = {method: [row for row in rows if _is_size(row, setting, method)] for method in methods}
        own = {method: sizes for method, sizes in own.items() if sizes}
        reference = baseline if len(own.get(baseline or "", ())) > 1 else max(own, key=lambda method: len(own[method]))
        for unit in EQUAL_UNITS:
            costs = sorted({cost for row in own[reference or ""] if (cost := getattr(row, unit)) is not None})
            found += [_at(sizes, unit, cost) for cost in costs for sizes in own.values()]
    return found


def _is_size(row: Row, setting: str, method: str) -> bool:
    return (row.setting, row.method) == (setting, method) and row.size != MEAN


def _at(sizes: Sequence[Row], unit: str, cost: float) -> AtCost:
    """A method at a cost, seed by seed."""
    known = [row for row in sizes if getattr(row, unit) is not None]
    costs = [getattr(row, unit) for row in known]
    seeds = set.intersection(*(set(row.seeds) for row in known)) if known else set()
    values = [at_cost(costs, [_by_seed(row)[seed] for row in known], cost) for seed in sorted(seeds)]
    inside = spread([value for value in values if value is not None])
    mean = inside.mean if inside.count else None
    return AtCost(sizes[0].setting, sizes[0].method, unit, cost, mean, inside.std)


def _reached(groups: Mapping[tuple[str, str], Sequence[Outcome]], target: float | None) -> list[Reached]:
    if target is None:
        return []
    found = []
    for key, runs in groups.items():
        labels = list(dict.fromkeys(label for run in runs for label in run.curves))
        for size in [*labels, MEAN]:
            curves = [(run, run.mean_curve if size == MEAN else run.curves.get(size, [])) for run in runs]
            found.append(_cost_to(key, size, curves, target))
    return found


def _cost_to(
    key: tuple[str, str], size: str, curves: Sequence[tuple[Outcome, list[tuple[int, float]]]], target: float
) -> Reached:
    ends = [(run, first_reached(curve, target, run.higher_is_better)) for run, curve in curves]
    there = [{"rounds": float(end)} | run.spent[end] for run, end in ends if end is not None]
    if len(there) < len(ends):
        return Reached(*key, size, len(there), len(ends), None, None, None)
    means = [spread([own[unit] for own in there]).mean for unit in ("rounds", "bytes", "training_macs")]
    return Reached(*key, size, len(there), len(ends), *means)


def _ordered(found: Any, asked: Any) -> list[Any]:
    """The values that occur, those that were asked for first and in that order."""
    there = list(dict.fromkeys(found))
    return [value for value in asked if value in there] + [value for value in there if value not in asked]


def _order(rows: Sequence[Row], label: str) -> tuple[float, str]:
    """Sizes by the number that their label is, or by what they have of parameters."""
    try:
        return float(label), ""
    except ValueError:
        return float(max((row.parameters or 0 for row in rows if row.size == label), default=0)), label


ROW_COLUMNS = tuple(entry.name for entry in fields(Row) if entry.name not in ("seeds", "values", "best_values"))
