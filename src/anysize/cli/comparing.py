"""The command `compare`: what it asks for, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from anysize.cli.printing import bytes_text, count_text, out, print_table, say
from anysize.errors import UsageError, in_flags
from anysize.runs.progress import err

if TYPE_CHECKING:
    from anysize.comparisons.comparison import Comparison, Row
    from anysize.config.tables import ExperimentConfig
    from anysize.engines.workers.pool import WorkerPool

_MANY = 40  # rows of costs beyond which the CSV is the better place


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    methods: Sequence[str]
    seeds: Sequence[int]
    changes: Sequence[str]
    out: Path | None
    overwrite: bool
    jobs: int | None
    shard: tuple[int, int] | None
    only: str | None
    baseline: str | None
    target: float | None


def compare_file(
    sources: Sequence[Path],
    request: Request,
    started: Callable[[ExperimentConfig], AbstractContextManager[WorkerPool | None]],
) -> Comparison:
    """Runs what an experiment file asks for; `started` gives worker processes, which load while this one does."""
    from anysize.comparisons.cells import cells
    from anysize.config.files import load

    if len(sources) > 1:
        raise UsageError("give one experiment file, or directories of finished runs")
    config = load(sources[0], request.changes)
    if not request.methods and (config.compare is None or not config.compare.methods):
        raise UsageError("no methods; give --methods flanc,heterofl, or a [compare] table with methods in the file")
    single = request.jobs is None and len(request.methods or cells(config)) == 1 and len(request.seeds) <= 1
    with started(config) if single else nullcontext() as pool:
        from anysize.comparisons.compare import compare

        return compare(
            config,
            request.methods or None,
            seeds=request.seeds,
            out=request.out,
            overwrite=request.overwrite,
            jobs=request.jobs,
            shard=request.shard,
            only=request.only,
            baseline=request.baseline,
            target=request.target,
            progress=True,
            pool=pool,
        )


def compare_directories(sources: Sequence[Path], request: Request) -> Comparison:
    """The comparison of finished runs."""
    from anysize.comparisons.compare import compare_runs

    given: dict[str, Any] = {"--methods": request.methods, "--seeds": request.seeds, "--set": request.changes}
    given |= {
        "--overwrite": request.overwrite,
        "--jobs": request.jobs,
        "--shard": request.shard,
        "--only": request.only,
    }
    wrong = [option for option, value in given.items() if value]
    if wrong:
        raise UsageError(f"{', '.join(wrong)}: of directories nothing is run; give an experiment file to run it")
    return compare_runs(sources, baseline=request.baseline, target=request.target, out=request.out)


def print_comparison(made: Comparison) -> None:
    """The metric by size, what it cost, and what was equal."""
    from anysize.comparisons.comparison import MEAN, in_percent
    from anysize.report.tables import times

    several = len(made.settings) > 1 or made.settings[0] != ""
    sizes = list(dict.fromkeys(size for setting in made.settings for size in made.sizes(setting)))
    names = [*(["setting"] if several else []), "method"]
    against = [f"to {made.baseline}"] if made.differences else []
    lines = []
    for setting in made.settings:
        for method in made.methods:
            rows = {size: made.row(method, size, setting) for size in (*sizes, MEAN)}
            whole = rows[MEAN]
            if whole is None:
                continue
            cells = [_cell(made, row) for row in rows.values()]
            cells.append(_value(made, whole.best_mean, whole.best_std))
            cells += [_difference(made, setting, method)] if against else []
            lines.append([*([setting] if several else []), method, *cells])
    print_table(names, [*sizes, MEAN, "best round", *against], lines, again=len(names))
    unit = " in percent" if in_percent(made) else ""
    judged = "on the test set" if made.judged_on == "test" else "on clients' held-out data"
    spread = f", mean ± standard deviation over {len(made.seeds)} seeds" if len(made.seeds) > 1 else ""
    rounds = times(made.rounds, "round")
    say(f"\n{made.metric}{unit} {judged} after {rounds}, by size{spread}. Best round: of the mean of sizes.")
    if made.differences:
        say(f"To {made.baseline}: the differences of the mean of sizes, seed by seed: their mean ± standard deviation.")
    _print_costs(made, several)
    if made.target is not None:
        _print_reached(made, several)
    say("\n" + "\n".join(made.statements))
    print_unfinished(made)
    if (made.directory / "compare.html").is_file():
        say(f"\n{made.directory / 'compare.html'}; compare.csv and compare.json beside it hold every number.")


def _cell(made: Comparison, row: Row | None) -> str:
    return "" if row is None else _value(made, row.mean, row.std)


def _value(made: Comparison, mean: float | None, std: float | None, sign: bool = False) -> str:
    from anysize.comparisons.comparison import shown

    value, small = shown(made, mean, std, sign)
    return f"{value} ± {small}" if small else value


def _difference(made: Comparison, setting: str, method: str) -> str:
    from anysize.comparisons.comparison import MEAN

    found = [d for d in made.differences if (d.setting, d.method, d.size) == (setting, method, MEAN)]
    return _value(made, found[0].mean, found[0].std, sign=True) if found else ""


def _print_costs(made: Comparison, several: bool) -> None:
    """What each size of a method costs; in many settings only the first, whose costs are mostly those of all."""
    from anysize.comparisons.comparison import MEAN

    rows = [row for row in made.rows if row.setting == made.settings[0] and row.size != MEAN]
    if len(rows) > _MANY:
        return
    lines = []
    for row in rows:
        costs: list[Any] = [row.macs or 0, row.training_macs or 0]
        cells = [f"{row.parameters or 0:,}", *map(count_text, costs)]
        cells += [bytes_text(row.activation_bytes or 0), bytes_text(row.bytes or 0)]
        lines.append([row.method, row.size, *cells])
    say(f"\nCost of a client{f' in {made.settings[0]}' if several else ''}:")
    numbers = ("parameters", "MACs", "training MACs", "activations", "bytes per round")
    print_table(["method", "size"], numbers, lines, again=2)


def _print_reached(made: Comparison, several: bool) -> None:
    from anysize.comparisons.comparison import MEAN

    table = Table(*(["setting"] if several else []), "method", box=None, header_style="bold")
    for column in ("reached by", "rounds", "bytes", "training MACs"):
        table.add_column(column, justify="right")
    for entry in made.reached:
        if entry.size != MEAN:
            continue
        spent = ["–"] * 3
        if entry.rounds is not None and entry.bytes is not None and entry.training_macs is not None:
            spent = [f"{entry.rounds:.0f}", bytes_text(entry.bytes), count_text(entry.training_macs)]
        cells = [escape(entry.method), f"{entry.reached} of {entry.seeds}", *spent]
        table.add_row(*([escape(entry.setting)] if several else []), *cells)
    say(f"\nUntil the mean of sizes reached {made.target:g}, all clients together:")
    out.print(table)


def print_unfinished(made: Comparison) -> None:
    """The runs that are not finished, and why some have failed."""
    if made.missing:
        say(f"\n{len(made.missing)} runs are not finished yet: {', '.join(made.missing[:5])}" + _more(made.missing))
    for path, text in made.failures.items():
        err.print(f"{path} has failed: {in_flags(text)}", style="red", markup=False)


def _more(paths: Sequence[str]) -> str:
    return f" and {len(paths) - 5} more" if len(paths) > 5 else ""
