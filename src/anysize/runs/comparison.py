"""Several methods, one experiment: a run for each method and seed, and one table of the results.

The runs differ in nothing but the method and the seed: with equal seeds all methods see the same partition,
participants, capacities and first weights. The options in the file's [method] table apply to that method only.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from anysize import config as configs
from anysize.config.own_code import look_in
from anysize.config.tables import ExperimentConfig, MethodConfig
from anysize.cost.count import Cost
from anysize.engines.workers.pool import WorkerPool
from anysize.errors import AnysizeError, CheckpointError, ConfigError
from anysize.experiment.experiment import Experiment
from anysize.methods import make
from anysize.runs import checkpoint as checkpoints
from anysize.runs import directory as directories
from anysize.runs.resuming import begun, fixed
from anysize.runs.run import Run
from anysize.runs.runner import run
from anysize.wire import Json

JSON, CSV = "compare.json", "compare.csv"
OnRunEvent = Callable[[str, Json], None]


@dataclass(frozen=True)
class Row:
    """One method at one size.

    Attributes:
        method: its name.
        size: the size's label.
        mean: the mean of the metric over the seeds, after the last round.
        std: the sample standard deviation over the seeds; None with a single seed.
        values: the metric of each seed, in the order of the seeds.
        parameters: what a client of that size trains and sends.
        macs: multiply-adds of one forward pass of the finished network, per sample.
        training_macs: multiply-adds of a loss and its backward pass, per sample.
        activation_bytes: what a training step holds.
        bytes_down: the message to a client in a round.
        bytes_up: the message back.
        inference_bytes: parameters and buffers of the finished network as it ships, batch-norm statistics included.
        nonzero_macs: multiply-adds of one forward pass whose weight is not zero.
    """

    method: str
    size: str
    mean: float
    std: float | None
    values: tuple[float, ...]
    parameters: int
    macs: int
    training_macs: int
    activation_bytes: int
    bytes_down: int
    bytes_up: int
    inference_bytes: int
    nonzero_macs: int


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison.

    Attributes:
        metric: the name of the figure of merit.
        higher_is_better: whether a larger metric is a better one.
        rounds: how many rounds every run had.
        seeds: the seeds of the runs.
        rows: a row per method and size, methods as asked for, smallest size first.
        directory: where the runs are.
    """

    metric: str
    higher_is_better: bool
    rounds: int
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    directory: Path

    def averages(self) -> dict[str, tuple[float, float | None]]:
        """Per method, the metric's mean over its sizes: mean and sample deviation over the seeds."""
        found = {}
        for method in dict.fromkeys(row.method for row in self.rows):
            by_seed = [statistics.fmean(v) for v in zip(*(row.values for row in self.rows if row.method == method))]
            found[method] = _mean_and_deviation(by_seed)
        return found

    def to_json(self) -> Json:
        """One JSON object, without the runs' folders."""
        about = {"metric": self.metric, "higher_is_better": self.higher_is_better, "rounds": self.rounds}
        averages = {method: {"mean": mean, "std": std} for method, (mean, std) in self.averages().items()}
        return about | {"seeds": list(self.seeds), "averages": averages, "rows": [asdict(row) for row in self.rows]}

    def to_csv(self) -> str:
        """CSV with a line per row and a column per seed."""
        text = io.StringIO()
        columns = [name for name in Row.__dataclass_fields__ if name != "values"]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*columns, *(f"{self.metric} seed {seed}" for seed in self.seeds)])
        for row in self.rows:
            values = asdict(row)
            writer.writerow([*(values[name] for name in columns), *row.values])
        return text.getvalue()


def compare(
    source: str | Path | ExperimentConfig,
    methods: Sequence[str],
    *,
    seeds: Sequence[int] = (),
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    on_event: OnRunEvent = lambda name, event: None,
    pool: WorkerPool | None = None,
) -> Comparison:
    """Run every method with every seed, each in a separate folder, and return the table.

    Finished runs are not repeated, and stopped runs continue: a second call with more methods or seeds costs only the
    new runs.

    Args:
        source: an experiment file or a config.
        methods: names, or "module:Class".
        seeds: by default the experiment's.
        out: the folder of all runs; by default runs/<name>-compare.
        overrides: "key=value" changes to the file.
        overwrite: run everything again instead.
        on_event: called with a run's folder name and each of its events.
        pool: worker processes that are already started, for all runs; see `run`.
    """
    base = source if isinstance(source, ExperimentConfig) else configs.load(source, overrides)
    chosen = tuple(seeds) or (base.seed,)
    folder = Path(out) if out is not None else Path("runs") / f"{base.name}-compare"
    _check(base, methods, chosen, folder)
    directories.make(folder)
    found: dict[str, list[Run]] = {}
    first: Experiment | None = None
    for seed in chosen:
        for method in methods:
            config = variant(base, method, seed)
            shares_data = first is not None and first.config.seed == seed
            experiment = first.with_config(config) if first and shares_data else Experiment.from_config(config)
            first = first if shares_data else experiment
            found.setdefault(method, []).append(_finished(experiment, folder / config.name, overwrite, on_event, pool))
    made = tabulate(found, chosen, folder)
    directories.write_text(folder / JSON, json.dumps(made.to_json(), indent=1) + "\n")
    directories.write_text(folder / CSV, made.to_csv())
    return made


def variant(base: ExperimentConfig, method: str, seed: int) -> ExperimentConfig:
    """The experiment with another method and seed, named after both.

    >>> base = configs.from_dict({"data": {"name": "digits", "clients": 4}, "model": {"name": "mlp"},
    ...                           "method": {"name": "flanc", "orthogonality": 1.0}})
    >>> variant(base, "flanc", 3).method.options, variant(base, "heterofl", 3).method.options
    ({'orthogonality': 1.0}, {})
    >>> variant(base, "mine:Mean", 3).name
    'mine.Mean-3'
    """
    own = base.method if method == base.method.name else MethodConfig(name=method)
    name = re.sub(r"[^\w.-]+", ".", method)
    return base.replaced(method=own, seed=seed, name=f"{name}-{seed}")


def tabulate(found: dict[str, list[Run]], seeds: Sequence[int], folder: Path) -> Comparison:
    """The table of finished runs, given by method in the order of the seeds."""
    task = next(iter(found.values()))[0].experiment.task
    rows: list[Row] = []
    for method, runs in found.items():
        finals = [_final(made, task.metric) for made in runs]
        for size in runs[0].sizes:
            values = tuple(final[size.label] for final in finals if size.label in final)
            rows.append(_row(method, size.label, values, runs[0].cost(size)))
    rounds = next(iter(found.values()))[0].config.rounds
    return Comparison(task.metric, task.higher_is_better, rounds, tuple(seeds), tuple(rows), folder)


def _row(method: str, size: str, values: tuple[float, ...], cost: Cost) -> Row:
    return Row(method, size, *_mean_and_deviation(values), values, **asdict(cost))


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; the latter is None for a single value."""
    mean = statistics.fmean(values) if values else math.nan
    return mean, statistics.stdev(values) if len(values) > 1 else None


def _final(made: Run, metric: str) -> dict[str, float]:
    """The metric per size after the last round, as the run measured it."""
    last = made.history[-1]
    if metric not in last:
        raise ConfigError(
            f'{made.directory}: its last round has no {metric}; a comparison needs evaluation.on to have "test"'
        )
    return dict(last[metric])


def _finished(
    experiment: Experiment, directory: Path, overwrite: bool, on_event: OnRunEvent, pool: WorkerPool | None
) -> Run:
    """The run in a directory; continues it to its end if it has not finished."""
    there = directories.holds_run(directory) and not overwrite
    if there:
        changed = configs.changes(begun(experiment, directories.saved_config(directory)), experiment.complete)
        if not changed and _is_over(experiment.config, directory):
            on_event(directory.name, {"event": "finished before"})
            return Run(directory, experiment)
        if fixed(changed):
            listed = "\n  ".join(configs.differences(changed))
            raise CheckpointError(
                f"{directory} holds a run of another experiment; choose another folder with --out, or run all again "
                f"with --overwrite. The differences:\n  {listed}"
            )
    watch = partial(on_event, directory.name)
    return run(experiment, out=directory, resume=there, overwrite=overwrite, on_event=watch, pool=pool)


def _is_over(config: ExperimentConfig, directory: Path) -> bool:
    """Whether the run in the directory has finished its last round."""
    return checkpoints.exists(directory) and checkpoints.round_of(directory) == config.rounds


def _check(base: ExperimentConfig, methods: Sequence[str], seeds: Sequence[int], folder: Path) -> None:
    """Refuse, before anything runs, what would otherwise fail hours later."""
    if base.folder is not None:
        look_in(base.folder)
    problems = [] if methods else ["methods: none given; give at least one"]
    problems += [f"methods: '{name}' occurs more than once" for name in _repeated(methods)]
    problems += [f"seeds: {seed} occurs more than once" for seed in _repeated(seeds)]
    problems += [f"seeds: {seed} is below 0" for seed in seeds if seed < 0]
    if "test" not in base.evaluation.on:
        problems.append('evaluation.on: a comparison needs "test"')
    for name in dict.fromkeys(methods):
        try:
            make(name, variant(base, name, 0).method.options)
        except AnysizeError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; choose another folder with --out")
    if directories.holds_run(folder):
        raise CheckpointError(f"{folder} holds a run itself; choose another folder for the comparison with --out")


def _repeated(values: Sequence[str] | Sequence[int]) -> Iterable[str | int]:
    return dict.fromkeys(value for value in values if list(values).count(value) > 1)
