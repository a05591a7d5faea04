"""Comparing methods: running what is not there yet, and the result of what is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from anysize import config as configs
from anysize.comparisons import locks, outcomes, working
from anysize.comparisons.cells import TUNING, Cell, cells, plan_tables
from anysize.comparisons.comparison import Comparison, tabulate
from anysize.comparisons.files import write
from anysize.comparisons.jobs import run_in_processes
from anysize.comparisons.outcomes import Outcome
from anysize.comparisons.tuning import Choice, chosen
from anysize.comparisons.watching import watching
from anysize.comparisons.working import OnRunEvent, Workshop
from anysize.config.compare import CompareConfig
from anysize.config.own_code import look_in
from anysize.config.tables import ExperimentConfig
from anysize.config.toml import flat, written
from anysize.engines.workers.pool import WorkerPool
from anysize.errors import AnysizeError, CheckpointError, ConfigError
from anysize.experiment.experiment import Experiment
from anysize.methods import Method, make, name_of
from anysize.records import directory as directories
from anysize.runs.progress import err
from anysize.wire import Json

PLAN = "compare.toml"
Source = str | Path | ExperimentConfig | Experiment


def compare(
    source: Source,
    methods: Sequence[str | Mapping[str, Any] | Method[Any]] | None = None,
    *,
    seeds: Sequence[int] = (),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    baseline: str | None = None,
    target: float | None = None,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    jobs: int | None = None,
    shard: tuple[int, int] | None = None,
    only: str | None = None,
    progress: bool | None = None,
    on_event: OnRunEvent | None = None,
    pool: WorkerPool | None = None,
) -> Comparison:
    """Runs every method in every setting with every seed, each in its own folder, and gives the result.

    Runs that are already finished are not run again, and runs that were stopped go on: asking a second time for more
    methods or seeds costs only what is new. A second process with the same folder shares the work.

    Args:
        source: an experiment file, a config, or an experiment, which may hold live objects.
        methods: names, tables as in [compare], or methods; by default those of the file.
        seeds: by default the file's.
        settings: named sets of changes; by default the file's.
        tune: keys with the values to choose from, on clients' held-out data; by default the file's.
        baseline: the label from which differences are taken; by default the file's.
        target: the metric whose cost is told; by default the file's.
        out: the folder of all runs; by default runs/<name>-compare.
        overrides: "key=value" changes to the file.
        overwrite: run everything anew instead.
        jobs: how many processes run cells, each with one thread; by default one for each core if there are that many
            cells. With one, cells run in this process.
        shard: (i, n) to take only the i-th of n parts of the cells, counted from 1.
        only: a pattern of paths, such as `iid/*/seed-0`: run only the cells that match.
        progress: show how far it is; by default on a terminal only, and not where `on_event` is given.
        on_event: called with a run's path in the folder and each of its events; all cells run in this process then.
        pool: worker processes that have been started already, for cells that run in this process; see `run`.
    """
    base = source if isinstance(source, Experiment) else None
    if isinstance(source, Experiment):
        config = source.config
    else:
        config = source if isinstance(source, ExperimentConfig) else configs.load(source, overrides)
    objects = {_title(entry): entry for entry in methods or () if isinstance(entry, Method)}
    config = asked(config, methods, seeds, settings, tune, baseline, target)
    folder = Path(out) if out is not None else Path("runs") / f"{config.name}-compare"
    every = _checked(config, folder, objects)
    directories.make(folder)
    if overwrite:
        working.clear(every, folder)
    shop = Workshop(folder, methods=objects, last=base)
    working.check(every, shop)
    locks.forget_failures(folder)
    _write_plan(config, folder)
    mine = [cell for cell in _of_shard(every, shard) if fnmatchcase(cell.path, only or "*")]
    if not mine and only:
        raise ConfigError(
            f"only = '{only}': no cell's path matches; there are {every[0].path}, and {len(every) - 1} more"
        )
    todo = [cell for cell in mine if not outcomes.is_finished(folder / cell.path, cell.config.rounds)]
    for cell in (cell for cell in mine if cell not in todo):
        (on_event or _silent)(cell.path, {"event": "finished before"})
    shown = progress if progress is not None else err.is_terminal and on_event is None
    here = on_event is not None or bool(objects) or (base is not None and _is_live(base))
    count = _jobs(jobs, todo, here)
    with watching(mine, folder, shown) as watch, ExitStack() as stack:
        if todo and count > 1:
            run_in_processes(config, todo, folder, count, watch or _nothing)
        elif todo:
            shop.engine = "inprocess" if jobs is not None else None
            shop.on_event = _both(on_event, watch)
            if config.engine.name == "processes" and shop.engine is None:
                shop.pool = pool or stack.enter_context(WorkerPool(config.engine.workers))
            working.work(todo, shop)
        if watch is not None:
            watch.look()
    return gathered(config, every, folder)


def asked(
    config: ExperimentConfig,
    methods: Sequence[str | Mapping[str, Any] | Method[Any]] | None = None,
    seeds: Sequence[int] = (),
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    baseline: str | None = None,
    target: float | None = None,
) -> ExperimentConfig:
    """The experiment with a [compare] table that says what is asked for here, and else what the file's says."""
    table = {} if config.compare is None else config.compare.model_dump(exclude_none=True)
    given: dict[str, Any] = {"settings": settings, "tune": tune, "baseline": baseline, "target": target}
    given |= {"seeds": tuple(seeds) or None}
    given["methods"] = None if methods is None else tuple(_entry(method) for method in methods)
    if not (table.get("methods") if methods is None else methods):
        raise ConfigError("compare.methods: none given; give at least one")
    made = CompareConfig(**(table | {key: value for key, value in given.items() if value is not None}))
    other = config.model_copy(update={"compare": made})  # keeps what the file gave, unlike `replaced`
    return other


def gathered(config: ExperimentConfig, every: Sequence[Cell], folder: Path, out: Path | None = None) -> Comparison:
    """The comparison of the cells that are finished, written into its folder, or into another."""
    found, choices = [], dict[tuple[str, str], Choice]()
    missing, failures = [], dict[str, str]()
    for cell in every:
        error = locks.failure(folder, cell.path)
        choice = chosen(cell, folder)
        if error is not None:
            failures[cell.path] = error
        elif choice is None or not outcomes.is_finished(folder / cell.path, cell.config.rounds):
            missing.append(cell.path)
        else:
            choices[cell.setting, cell.label] = choice
            found.append(outcomes.read(folder / cell.path, cell.setting, cell.label, cell.path, choice.values))
    made = tabulate(found, config.compare or CompareConfig(), out or folder, choices, failures, missing)
    directories.make(made.directory)
    write(made)
    return made


def compare_runs(
    directories_: Sequence[str | Path],
    *,
    baseline: str | None = None,
    target: float | None = None,
    out: str | Path | None = None,
) -> Comparison:
    """The comparison of runs that are finished, without running anything.

    A comparison's folder stands for what is finished of it. Of other runs those that differ in nothing but the seed are
    one entry, called by its method, or by the run's name where there are several entries of that method.

    Args:
        directories_: run directories, folders that hold such, or one comparison's folder.
        baseline: the label from which differences are taken.
        target: the metric whose cost is told.
        out: where to write the tables and the page; by default into a comparison's own folder, else nowhere.
    """
    places = [Path(place) for place in directories_]
    if len(places) == 1 and (places[0] / PLAN).is_file():
        config = asked(configs.load(places[0] / PLAN), baseline=baseline, target=target)
        return gathered(config, cells(config), places[0], None if out is None else Path(out))
    found = labelled([(place, outcomes.read(place)) for place in run_directories(places)])
    made = tabulate(found, CompareConfig(baseline=baseline, target=target), Path(out or "."))
    if out is not None:
        directories.make(Path(out))
        write(made)
    return made


def run_directories(places: Sequence[Path]) -> list[Path]:
    """The finished runs among the places and in the folders below them, but for tuning runs."""
    found: list[Path] = []
    for place in places:
        below = [place] if directories.holds_run(place) else sorted(path.parent for path in place.rglob("config.toml"))
        runs = [path for path in below if directories.holds_run(path) and path.parent.name != TUNING]
        if not runs:
            raise CheckpointError(f"{place} holds no run; give run directories, or a folder with some below it")
        found += [path for path in runs if outcomes.end_of(path) is not None]
    if not found:
        raise CheckpointError("none of these runs is finished; go on with them with resume=True")
    return list(dict.fromkeys(found))


def labelled(runs: Sequence[tuple[Path, Outcome]]) -> list[Outcome]:
    """The runs, each labelled with its method, and with its name too where a method has several entries."""
    entries: dict[str, list[Outcome]] = {}
    for _, outcome in runs:
        same = {key: value for key, value in flat(outcome.config.to_dict()).items() if not _is_aside(key)}
        entries.setdefault(repr(sorted(same.items())), []).append(outcome)
    methods = [own[0].config.method.name for own in entries.values()]
    found = []
    for method, own in zip(methods, entries.values()):
        label = method if methods.count(method) == 1 else f"{method} ({own[0].config.name})"
        found += [replace(outcome, label=label) for outcome in own]
    return found


def _is_aside(key: str) -> bool:
    """Whether two runs that differ in a key are still of one entry."""
    return key in ("name", "seed", "checkpoint_every") or key.startswith(("engine.", "track."))


def _write_plan(config: ExperimentConfig, folder: Path) -> None:
    """The experiment with its [compare] table, so that the folder says what it is, and what is not finished yet."""
    tables = plan_tables(config)
    directories.write_text(folder / PLAN, written(tables))


def _entry(method: str | Mapping[str, Any] | Method[Any]) -> dict[str, Any]:
    """A method as an entry of [compare]."""
    if isinstance(method, str):
        return {"name": method}
    if not isinstance(method, Method):
        return dict(method)
    options: dict[str, Any] = {}
    options |= {entry.name: getattr(method, entry.name) for entry in fields(method)} if is_dataclass(method) else {}
    return {"name": name_of(method), "label": _title(method), "options": options}


def _title(method: Method[Any]) -> str:
    """What a method that is given as an object is called."""
    return name_of(method).rpartition(":")[2].rpartition(".")[2]


def _checked(config: ExperimentConfig, folder: Path, objects: Mapping[str, Method[Any]]) -> list[Cell]:
    """The cells; refuses, before anything runs, what could only fail hours later."""
    if config.folder is not None:
        look_in(config.folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; choose another folder with out=")
    if directories.holds_run(folder):
        raise CheckpointError(f"{folder} holds a run itself; choose another folder for the comparison with out=")
    found = cells(config)
    problems = []
    for cell in {(cell.setting, cell.label): cell for cell in found}.values():
        try:
            if cell.label not in objects:
                make(cell.config.method.name, cell.config.method.options)
        except AnysizeError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return found


def _of_shard(every: Sequence[Cell], shard: tuple[int, int] | None) -> list[Cell]:
    """The cells of one part; those that share tuning runs stay together."""
    if shard is None:
        return list(every)
    number, count = shard
    if not 1 <= number <= count:
        raise ConfigError(f"shard {number}/{count}: must be from 1/{count} to {count}/{count}")
    units = list(dict.fromkeys((cell.setting, cell.label) if cell.trials else cell.path for cell in every))
    mine = {unit for place, unit in enumerate(units) if place % count == number - 1}
    return [cell for cell in every if ((cell.setting, cell.label) if cell.trials else cell.path) in mine]


def _jobs(jobs: int | None, todo: Sequence[Cell], here: bool) -> int:
    """How many processes run cells."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs: given {jobs}, must be at least 1")
    if here:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runs = {path for cell in todo for path in (cell.path, *(trial.path for trial in cell.trials))}
    return min(jobs or cores, max(1, len(runs)))


def _is_live(experiment: Experiment) -> bool:
    return any(experiment.is_live(kind) for kind in ("data", "model", "task", "method"))


def _both(on_event: OnRunEvent | None, watch: Any) -> OnRunEvent:
    def tell(path: str, event: Json) -> None:
        if watch is not None:
            watch()
        if on_event is not None:
            on_event(path, event)

    return tell


def _silent(path: str, event: Json) -> None: ...


def _nothing() -> None: ...
