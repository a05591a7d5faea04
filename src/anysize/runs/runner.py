"""Rounds, evaluation, checkpoint and resume, events: a run from its directory's first file to its last event."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anysize import config as configs
from anysize import interrupts
from anysize.attacks import Attack
from anysize.callbacks import Callback, of_config
from anysize.client import stacking
from anysize.client.batches import draw
from anysize.client.process import hold_memory, one_thread
from anysize.cost.count import Cost
from anysize.devices.fleet import Fleet
from anysize.devices.groups import round_seconds
from anysize.engines.base import Absence, Engine
from anysize.engines.inprocess import InProcess
from anysize.engines.malicious import Malicious
from anysize.engines.stacked import Stacked
from anysize.engines.workers.engine import Processes, obstacle
from anysize.engines.workers.pool import WorkerPool
from anysize.errors import AnysizeError, CheckpointError, ConfigError
from anysize.experiment.brief import Brief
from anysize.experiment.experiment import Experiment, evaluation_part, metric_names
from anysize.experiment.privacy import check_private, mechanism, spent
from anysize.experiment.robust import check_rule
from anysize.experiment.secure import check_secure
from anysize.methods.capabilities import Finishing, Observed, asks_held_out, parts_of
from anysize.methods.messages import Client, Update
from anysize.methods.private import Mechanism
from anysize.profiling import Clock, measuring, stage
from anysize.records import checkpoint as checkpoints
from anysize.records import directory as directories
from anysize.records.background import Background
from anysize.records.checkpoint import Checkpoint
from anysize.records.directory import CONFIG, ENVIRONMENT, EVENTS, saved_config
from anysize.records.events import history, read_events
from anysize.runs.hooks import Hooks
from anysize.runs.progress import OnEvent, watched
from anysize.runs.resuming import resumed
from anysize.runs.run import Run
from anysize.server.calibration import Traffic, calibrate
from anysize.server.judging import by_group, check_attackable, judged, on_clients, on_test, shuffled, under_attack
from anysize.server.round import Tally, run_round
from anysize.tasks import label_counts
from anysize.wire import Json, Tensors, flatten, restore

_HISTOGRAM_CLIENTS = 200
_OBSERVED = 16  # test samples that a method sees for the report


MakeEngine = Callable[[Experiment, Mapping[int, Tensors]], Engine]
"""Makes the engine of an experiment from the tensors that stay with each client; the run updates that mapping."""


def run(
    source: str | Path | Experiment,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    profile: bool = False,
    progress: bool | None = None,
    on_event: OnEvent | None = None,
    callbacks: Sequence[Callback] = (),
    engine: MakeEngine | None = None,
    pool: WorkerPool | None = None,
) -> Run:
    """Run an experiment to its end, and return the finished run.

    Args:
        source: an experiment file, or an experiment.
        out: the run directory; by default runs/<name>.
        overrides: "key=value" changes to the file.
        resume: continue the run in the directory; values that the source leaves out stay as they are there.
        overwrite: replace the run in the directory.
        profile: note in every round's event where its time went; see `anysize.profiling`.
        progress: whether to show the progress, as a bar on a terminal and in a notebook, and as lines elsewhere; by
            default on a terminal and in a notebook, unless `on_event` is given.
        on_event: called with every event as it happens, and with {"event": "client", ...} after each client.
        callbacks: called between rounds, after those that the experiment names; see `anysize.callbacks`.
        engine: makes the engine, instead of the one that the experiment names; for a fleet of real devices.
        pool: worker processes that are already started, for an engine that uses them; they stay for other runs.
    """
    experiment = source if isinstance(source, Experiment) else Experiment.from_config(configs.load(source, overrides))
    directory = Path(out) if out is not None else Path("runs") / experiment.config.name
    hold_memory()
    clock = Clock() if profile else None
    watching = watched(experiment.config.rounds, on_event, progress)
    # One thread: the number of threads changes the last bits, on the server as on a client.
    with interrupts.deferred(), watching as tell, one_thread(), measuring(clock):
        runner = _Runner(experiment, directory, tell, clock, engine, pool, callbacks)
        experiment = runner.go(resume=resume, overwrite=overwrite)
    return Run(directory, experiment)


def _listed(callbacks: Iterable[Callback]) -> list[Callback]:
    """The callbacks, taken once: an iterator gives them only once."""
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks: given {callbacks!r}; give a list of callbacks, such as [KeepBest()]")
    return list(callbacks)


class _Runner:
    """One run from its directory's first file to its last event."""

    def __init__(
        self,
        experiment: Experiment,
        directory: Path,
        on_event: OnEvent,
        clock: Clock | None = None,
        make_engine: MakeEngine | None = None,
        pool: WorkerPool | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._experiment = experiment
        self._given = _listed(callbacks)
        self._hooks = Hooks(self._given, directory)
        self._make_engine = make_engine
        self._clock = clock
        self._directory = directory
        self._on_event = on_event
        self._costs: dict[str, Cost] = {}
        self._metrics: list[str] = []
        self._saved = 0  # the round of the newest checkpoint, which may be under way
        self._writing = Background()
        self._pool = pool
        self._mechanism: Mechanism | None = None
        self._void = 0  # consecutive rounds with too few answers
        self._devices: dict[int, Json] = {}  # the name and the device group of each that has joined

    def go(self, *, resume: bool, overwrite: bool) -> Experiment:
        """Run to the end, and return the experiment as it was run."""
        began = time.perf_counter()
        with self._experiment.blamed("before the first round"), ExitStack() as stack:
            self._check(resume, overwrite)
            self._pool = self._started_pool(stack) if self._wants_pool() else None
            fresh = self._tried()
            directories.make(self._directory)
            stack.enter_context(directories.locked(self._directory))
            current = self._resumed(fresh) if resume else self._begun(fresh, overwrite)
            engine = stack.enter_context(self._engine(current))
            stack.enter_context(self._writing)
            started = stack.pop_all()
        with started:
            self._profile()  # the first round's time starts here, with workers ready
            self._hooks.begin(self._experiment.complete, current.round)
            self._granted(current, engine)
            while current.round < self._experiment.config.rounds and self._hooks.wishes.stop is None:
                interrupts.check()
                with self._experiment.blamed(f"round {current.round + 1}, which is not saved"):
                    current = self._round(current, engine)
            stopped = self._hooks.wishes.stop if current.round < self._experiment.config.rounds else None
            if stopped is not None:
                with self._experiment.blamed("after the run was stopped"):
                    self._close(current, engine)
            self._writing.wait()
            end = {"event": "end", "round": current.round, "seconds": round(time.perf_counter() - began, 3)}
            self._event(end | ({} if stopped is None else {"stopped": stopped}) | self._profile())
            self._hooks.end(stopped)
        return self._experiment

    def _check(self, resume: bool, overwrite: bool) -> None:
        """Refuse what is visibly wrong before anything is prepared."""
        if self._make_engine is None:
            _check_engine(self._experiment.config)
        elif self._experiment.config.adversary.name != "none":
            raise ConfigError("adversary.name: attackers are simulated, and this engine has real clients; leave it out")
        elif self._experiment.config.privacy.clip is not None:
            raise ConfigError("privacy.clip: its guarantee is for simulations, and this engine has real clients")
        if resume:
            self._check_resumable()
        else:
            self._experiment.check_options()
            directories.check_free(self._directory, overwrite)
        self._hooks = Hooks([*of_config(self._experiment.config), *self._given], self._directory)
        self._hooks.check(self._experiment.config)

    def _wants_pool(self) -> bool:
        """Whether worker processes will be needed."""
        ours = self._make_engine is None and self._experiment.config.engine.name == "processes"
        return ours and obstacle(self._experiment) is None

    def _started_pool(self, stack: ExitStack) -> WorkerPool:
        """Worker processes; they start while the rest is prepared, and new ones end with the stack."""
        pool = self._pool or stack.enter_context(WorkerPool(self._experiment.config.engine.workers))
        pool.start()
        return pool

    def _tried(self) -> Any:
        """The method's first state; any fault of the experiment shows here, before a file is written."""
        experiment = self._experiment
        if "test" in experiment.config.evaluation.on:
            evaluation_part(experiment)
        experiment.calibration_proxy()
        interrupts.check()
        if asks_held_out(experiment.method) and experiment.data is not None and not experiment.config.data.validation:
            raise ConfigError("method: it evaluates on the clients' holdouts, and they have none; set data.validation")
        if experiment.config.evaluation.attack != "none":
            check_attackable(experiment)
        if experiment.config.training.stack > 1:
            stacking.check(experiment.context, experiment.method)
        self._metrics = metric_names(experiment)
        fresh = experiment.method.init(experiment.context)
        check_rule(experiment, fresh)
        check_private(experiment)
        check_secure(experiment, fresh)
        mechanism(experiment, fresh)
        for size in experiment.context.sizes:
            interrupts.check()
            self._costs[size.label] = experiment.cost(size, state=fresh)
        return fresh

    def _begun(self, fresh: Any, overwrite: bool) -> Checkpoint:
        """The checkpoint before the first round of a new run."""
        directories.check_free(self._directory, overwrite)
        directories.clear(self._directory)
        self._write_about()
        return self._started(fresh)

    def _resumed(self, fresh: Any) -> Checkpoint:
        """The checkpoint that the run in the directory continues from."""
        if not directories.has_progress(self._directory):
            return self._begun(fresh, overwrite=True)
        current = checkpoints.restore_from(self._directory, fresh)
        self._saved = current.round
        rounds = self._experiment.config.rounds
        if current.round > rounds:
            raise CheckpointError(
                f"{self._directory} has finished {current.round} rounds already, and rounds = {rounds}; give at least "
                f"rounds = {current.round}"
            )
        directories.rewind(self._directory, current.round)
        directories.write_text(self._directory / CONFIG, configs.dumps(self._experiment.complete))
        if not any(event["event"] == "start" for event in read_events(self._directory / EVENTS)):
            self._event(self._start_event())  # killed before it was written whole
        self._event({"event": "resume", "round": current.round})
        return current

    def _started(self, fresh: Any) -> Checkpoint:
        current = Checkpoint(0, fresh)
        directories.begin_rows(self._directory, self._metrics)
        self._save(current)
        self._event(self._start_event())
        return current

    def _engine(self, current: Checkpoint) -> Engine:
        engine, stack = self._plain_engine(current), self._experiment.config.training.stack
        if stack > 1:
            engine = Stacked(engine, stack, self._experiment.shares.samples)
        attack = Attack(self._experiment.config.adversary, self._experiment.config.seed)
        return Malicious(engine, attack, self._experiment.attackers) if attack.on_updates else engine

    def _plain_engine(self, current: Checkpoint) -> Engine:
        experiment, options = self._experiment, self._experiment.config.engine
        if self._make_engine is not None:
            return self._make_engine(experiment, current.kept)
        if options.name != "inprocess":
            reason = obstacle(experiment)
            if reason is None and self._pool is not None:
                return Processes(experiment, current.kept, pool=self._pool)
            if reason is None:
                return engine_kind(options.name)(experiment, current.kept, options.workers)
            self._on_event({"event": "notice", "text": f"clients run in this process, one after another: {reason}"})
        return InProcess(experiment.context, experiment.method, experiment.shares, current.kept)

    def _round(self, before: Checkpoint, engine: Engine) -> Checkpoint:
        began = time.perf_counter()
        experiment, number = self._experiment, before.round + 1
        config, context, method = experiment.config, experiment.context, experiment.method
        rate = config.training.rate(number - 1, config.rounds)
        fleet = engine.fleet(number, experiment.fleet)
        self._introduce(number, fleet)
        clients = self._clients(number, fleet)
        least = config.engine.min_clients or (0 if fleet.present is None else 1)
        self._mechanism = self._mechanism or mechanism(experiment, before.state)
        private = None if self._mechanism is None else self._mechanism.round(number, before.clip)
        told = self._progress(number, len(clients))
        state, tally = run_round(context, method, before.state, clients, engine, rate, told, least, private)
        momentum, missing = before.momentum, list[Absence]()
        if not tally.void:
            factor, buffers = context.tricks.server_momentum, dict(context.template.named_buffers())
            state, momentum = with_momentum(before.state, state, before.momentum, factor, buffers)
        if number == config.rounds:
            state = self._finished(state, engine, number, missing, fleet)
        before.kept.update(tally.kept)  # the engine reads from this mapping
        turns = before.turns | dict.fromkeys(tally.kept, number)
        adaptive = private is not None and private.mechanism.quantile is not None
        clip = private.next_clip() if private is not None and adaptive else None
        after = Checkpoint(number, state, momentum, {}, before.kept, turns, clip)
        event = self._round_event(number, tally, fleet)
        if number % config.evaluate_every == 0 or number == config.rounds:
            with stage("evaluate"), measuring(None):  # includes extracting, sending and calibrating
                event |= self._evaluate(after, engine, fleet, missing)
            directories.write_analysis(self._directory, number, self._analysis(state))
        event |= _missing(tally, missing)
        about = spent(experiment, number)
        if about is not None and private is not None:
            event["privacy"] = about | ({"clip": private.clip} if adaptive else {})
        event["seconds"] = round(time.perf_counter() - began, 3)
        with stage("checkpoint"):
            self._writing.wait()  # so that the log is never more than a round ahead of the checkpoint
        self._event(event | self._profile())
        with self._saving(after):
            self._hooks.after_round(event)
        self._void = self._void + 1 if tally.void else 0
        stops = self._void == config.engine.void_rounds and number < config.rounds
        if number % config.checkpoint_every == 0 or number == config.rounds or stops:
            with stage("checkpoint"):
                self._save_beside(after)
        self._granted(after, engine)
        if stops:
            raise AnysizeError(self._given_up(number, least, tally))
        return after

    @contextmanager
    def _saving(self, current: Checkpoint) -> Iterator[None]:
        """If a callback fails inside, save the round first: it is not the round that failed."""
        try:
            yield
        except (Exception, SystemExit, KeyboardInterrupt):
            self._save(current)
            raise

    def _granted(self, current: Checkpoint, engine: Engine) -> None:
        """Keep the state after this round as the best, if a callback asks for it."""
        why, self._hooks.wishes.keep = self._hooks.wishes.keep, None
        if why is None:
            return
        if self._saved != current.round:
            self._save(current)
        self._writing.wait()
        self._event({"event": "kept", "round": current.round, "why": why})
        best = replace(current, state=self._finished(current.state, engine, current.round, []))
        checkpoints.keep(self._directory, best, Brief.of(self._experiment).found())
        self._hooks.kept = current.round

    def _finished(
        self, state: Any, engine: Engine, number: int, missing: list[Absence], fleet: Fleet | None = None
    ) -> Any:
        """The state as it is after a last round."""
        experiment, method = self._experiment, self._experiment.method
        if not (isinstance(method, Finishing) and method.finishes):
            return state
        who = fleet or engine.fleet(number, experiment.fleet)
        asked = (experiment.context, engine, who, number, experiment.config.evaluation.clients)
        return method.finish(experiment.context, state, partial(judged, *asked, missing=missing))

    def _close(self, current: Checkpoint, engine: Engine) -> None:
        """Let a stopped run end as one that has done all its rounds: finished, evaluated and saved."""
        experiment, number, missing = self._experiment, current.round, list[Absence]()
        event = next(iter(reversed(history(self._directory))), {})
        state = self._finished(current.state, engine, number, missing)
        evaluated = experiment.task.metric in event or "client_metrics" in event
        if number > 0 and not (evaluated and state is current.state):
            current.state = state
            event |= self._evaluate(current, engine, engine.fleet(number, experiment.fleet), missing)
            directories.write_analysis(self._directory, number, self._analysis(state))
            self._event(event)
            with self._saving(current):
                self._hooks.after_evaluation(event)
            self._save(current)
            self._granted(current, engine)
        elif self._saved != number:
            self._save(current)

    def _analysis(self, state: Any) -> dict[str, Tensor]:
        """The method's arrays for the report."""
        experiment = self._experiment
        context, method = experiment.context, experiment.method
        found = dict(method.describe(context, state))
        if isinstance(method, Observed) and "test" in experiment.config.evaluation.on:
            some = shuffled(evaluation_part(experiment), _OBSERVED)
            found |= method.observe(context, state, draw(some, torch.arange(len(some))).x)
        return found

    def _introduce(self, number: int, fleet: Fleet) -> None:
        """An event that lists the devices that are new, or can train another size than before."""
        found = {
            client: {"name": name, "group": fleet.group_of(client, number).name} for client, name in fleet.names.items()
        }
        new = [{"client": client} | about for client, about in found.items() if self._devices.get(client) != about]
        self._devices = found
        if new:
            self._event({"event": "devices", "round": number, "devices": new})

    def _given_up(self, number: int, least: int, tally: Tally) -> str:
        """The error of a run that stops because too few clients answer."""
        missing = (
            "; ".join(f"client {entry['client']}: {entry['why']}" for entry in tally.missing) or "no device was there"
        )
        return (
            f"stopped after round {number}: {self._void} rounds in a row (engine.void_rounds) had fewer answers than "
            f"the {least or 1} that a round needs (engine.min_clients). In the last one: {missing}. What was learned "
            "before is saved; continue with resume=True when the devices are back"
        )

    def _clients(self, number: int, fleet: Fleet) -> list[Client]:
        """The participants in the order of aggregation: by predicted cost, largest first, then by id."""
        experiment = self._experiment
        found = []
        for client in fleet.participants(number):
            size = experiment.size_of_group[fleet.group_of(client, number).key]
            samples = experiment.shares.samples(client)
            found.append((-self._costs[size.label].training_macs * samples, client, size, samples))
        seed = experiment.config.seed
        ordered = sorted(found, key=lambda entry: entry[:2])
        return [Client(c, i, size, number, samples, seed) for i, (_, c, size, samples) in enumerate(ordered)]

    def _evaluate(self, current: Checkpoint, engine: Engine, fleet: Fleet, missing: list[Absence]) -> Json:
        """Calibrate if needed, measure, and put the statistics into the checkpoint."""
        experiment = self._experiment
        config, context, method = experiment.config, experiment.context, experiment.method
        traffic = Traffic()
        asked = (engine, fleet, current.round, None, missing, traffic)
        current.statistics = used = calibrate(experiment, current.state, *asked)
        event: Json = {"calibration": asdict(traffic)} if traffic.bytes_down else {}
        metric = context.task.metric
        if "test" in config.evaluation.on:
            test, batch = evaluation_part(experiment), config.evaluation.batch_size
            apart = config.evaluation.by_domain
            metrics = on_test(context, method, current.state, test, used, batch, by_domain=apart, engine=engine)
            event |= {metric: _main(metrics, metric), "metrics": metrics}
            if used and context.tricks.batch_norm == "batch":  # as in the papers that normalise by the test batch
                by_batch = on_test(context, method, current.state, test, {}, batch, by_domain=apart, engine=engine)
                event["by_test_batch"] = _main(by_batch, metric)
            if config.evaluation.attack != "none":
                event["robust"] = under_attack(context, method, current.state, test, used, config.evaluation)
        if "clients" in config.evaluation.on:
            sizes, chosen = experiment.size_of_group, config.evaluation
            who = (fleet, sizes, used, current.round, chosen.clients, chosen.batch_size, missing)
            rows = on_clients(context, method, current.state, engine, *who)
            if rows:
                directories.append_rows(self._directory, rows)
            scores = by_group(rows, metric, context.task.higher_is_better)
            event["client_metrics"] = {g.name: scores[g.name] for g in fleet.groups if g.name in scores}
        return event

    def _round_event(self, number: int, tally: Tally, fleet: Fleet) -> Json:
        training = self._experiment.config.training
        virtual = []
        for client in tally.clients:
            group = fleet.group_of(client["client"], number)
            client["group"] = group.name
            domain = self._experiment.shares.group_of(client["client"])
            if domain is not None:
                client["domain"] = domain
            cost = self._costs[client["size"]]
            seen = training.local_steps * training.batch_size if training.local_steps else None
            if seen is None and client["samples"] is None:
                continue
            samples = seen or client["samples"] * (training.local_epochs or 1)
            virtual.append(round_seconds(group, cost.training_macs * samples, cost.bytes_down, cost.bytes_up))
        event = {
            "event": "round",
            "round": number,
            "train_loss": tally.train_loss,
            "bytes_down": tally.bytes_down,
            "bytes_up": tally.bytes_up,
            "clients": tally.clients,
        }
        known = [seconds for seconds in virtual if seconds is not None]
        return event | ({"virtual_seconds": max(known)} if known else {})

    def _start_event(self) -> Json:
        experiment = self._experiment
        config, context = experiment.config, experiment.context
        groups = []
        for group in experiment.fleet.groups:
            labels = [size.label for size in experiment.sizes_of(group)]
            budget = None if group.budget is None else group.budget.limits()
            one = labels[0] if len(labels) == 1 else None
            about: Json = {"name": group.name, "label": group.label or group.name, "size": one, "sizes": labels}
            about |= {"clients": group.clients or None, "capacity": group.capacity, "budget": budget}
            about |= asdict(self._costs[one]) if one else {}
            groups.append(about | ({} if labels else {"sits_out": experiment.sits_out(group)}))
        return {
            "event": "start",
            "name": config.name,
            "method": config.method.name,
            "method_options": experiment.complete.method.options,
            "model": config.model.name,
            "data": config.data.name,
            "rounds": config.rounds,
            "seed": config.seed,
            "metric": context.task.metric,
            "higher_is_better": context.task.higher_is_better,
            "sizes": [
                {"label": size.label, "width": size.width, "depth": size.depth, "mask": size.mask}
                | asdict(self._costs[size.label])
                for size in context.sizes
            ],
            "groups": groups,
            "parts": parts_of(experiment.method, context),
            "partition": partition_summary(experiment),
            "notices": experiment.notices(),
        }

    def _profile(self) -> Json:
        """The time of each stage since the last event; empty unless the run is profiled."""
        return {} if self._clock is None else {"profile": self._clock.take()}

    def _progress(self, number: int, clients: int) -> Callable[[Update | Absence], None]:
        done = 0

        def on_answer(answer: Update | Absence) -> None:
            nonlocal done
            done += 1
            why = {"missing": asdict(answer)} if isinstance(answer, Absence) else {}
            self._on_event({"event": "client", "round": number, "done": done, "of": clients} | why)

        return on_answer

    def _check_resumable(self) -> None:
        if not directories.has_progress(self._directory):
            directories.check_free(self._directory, overwrite=True)
            text = f"nothing was saved in {self._directory} yet, so the run starts with its first round"
            self._on_event({"event": "notice", "text": text})
            return
        old = saved_config(self._directory)
        self._experiment, kept = resumed(self._experiment, old, self._directory)
        if kept:
            text = f"values that the experiment leaves out stay as the run started: {'; '.join(kept)}"
            self._on_event({"event": "notice", "text": text})
        new = self._experiment.config
        both = range(min(old.rounds, new.rounds))
        if any(old.training.rate(r, old.rounds) != new.training.rate(r, new.rounds) for r in both):
            text = (
                f"the learning rate's schedule spans all rounds: with rounds = {new.rounds} instead of {old.rounds}, "
                f"the coming rounds have other rates, and the result differs from that of {new.rounds} rounds in one go"
            )
            self._on_event({"event": "notice", "text": text})
        data, before = self._experiment.data, directories.saved_environment(self._directory).get("data", {})
        if data is not None and data.checksum != before.get("checksum", data.checksum):
            raise CheckpointError(
                f"the data is not what the run in {self._directory} was trained on (sha256 {before['checksum'][:12]}, "
                f"now {data.checksum[:12]}); restore the old data, or start again with out= or overwrite=True"
            )

    def _write_about(self) -> None:
        """Write the config and the environment: the files that mark a run directory."""
        data, folder = self._experiment.data, self._experiment.config.folder
        source = {"checksum": data.checksum, "source": data.source} if data is not None else {"source": "devices"}
        about = environment() | {"data": source, "folder": None if folder is None else str(folder.resolve())}
        about["revision"] = None if folder is None else _revision(folder)
        about["id"] = uuid.uuid4().hex
        # In this order, since a config.toml alone could belong to anything.
        directories.write_text(self._directory / ENVIRONMENT, json.dumps(about, indent=1) + "\n")
        directories.write_text(self._directory / CONFIG, configs.dumps(self._experiment.complete))

    def _save(self, current: Checkpoint) -> None:
        """Write a checkpoint, and return when it is on disk."""
        self._save_beside(current)
        self._writing.wait()

    def _save_beside(self, current: Checkpoint) -> None:
        """Write a checkpoint while the next round trains.

        Rounds make new states and leave the old one as it is; only the mapping of what clients keep goes on changing.
        """
        still = replace(current, kept=dict(current.kept))
        about = Brief.of(self._experiment).found()
        self._writing.start(partial(checkpoints.save, self._directory, still, about, self._saved))
        self._saved = current.round

    def _event(self, event: Json) -> None:
        directories.append_event(self._directory, event)
        self._on_event(event)


def _main(metrics: Mapping[str, Mapping[str, float]], metric: str) -> dict[str, float]:
    """One metric of every size."""
    return {label: values[metric] for label, values in metrics.items()}


def _missing(tally: Tally, asked: Sequence[Absence]) -> Json:
    """The clients that did not answer in a round, and whether that made it void; empty if all answered."""
    found = [entry | {"task": "train"} for entry in tally.missing]
    found += [asdict(absence) | {"task": "evaluate"} for absence in asked]
    return ({"missing": found} if found else {}) | ({"void": True} if tally.void else {})


def with_momentum(
    before: Any, after: Any, momentum: Tensors, factor: float, buffers: Collection[str] = ()
) -> tuple[Any, Tensors]:
    """The server's step with momentum: v <- factor v + (after - before), state <- before + v.

    Buffers, such as running statistics, get no momentum: a variance with momentum could fall below zero.
    """
    if factor == 0:
        return after, {}
    old, _ = flatten(before)
    new, note = flatten(after)
    moved: Tensors = {}
    for name, tensor in new.items():
        if tensor.is_floating_point() and name.split("/")[-1] not in buffers:
            moved[name] = momentum.get(name, torch.zeros_like(tensor)) * factor + (tensor - old[name])
    stepped = {name: old[name] + moved[name] if name in moved else tensor for name, tensor in new.items()}
    return restore(type(after), stepped, note), moved


def partition_summary(experiment: Experiment) -> Json:
    """Samples and label counts of the first clients, for the report."""
    shares, about = experiment.shares, experiment.signature
    if experiment.data is None:
        return {"clients": len(shares), "classes": about.classes, "class_names": None, "samples": [], "histogram": None}
    first = range(min(len(shares), _HISTOGRAM_CLIENTS))
    histogram = None
    if about.classes is not None and about.classes <= 100:
        labels = [shares.share(client).train.labels() for client in first]
        histogram = [label_counts(own, about.classes).tolist() for own in labels]
    return {
        "clients": len(shares),
        "classes": about.classes,
        "class_names": list(about.class_names) if about.class_names else None,
        "samples": [shares.samples(client) for client in first],
        "histogram": histogram,
    }


def environment() -> Json:
    """Versions and hardware."""
    return {
        "anysize": _version("anysize"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _revision(folder: Path) -> str | None:
    """The Git commit of the experiment's folder, with "+" if tracked files there differ from it; None without Git."""
    git = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def engine_kind(name: str) -> Callable[[Experiment, Mapping[int, Tensors], int | None], Engine]:
    """The engine of that name, which runs clients in other processes; an error if it needs a missing package."""
    if name == "flower":
        from anysize.engines.flower import Flower  # an extra

        return Flower
    return Processes


def _check_engine(config: configs.ExperimentConfig) -> None:
    """Refuse an engine that is not installed, or cannot run the experiment."""
    if config.own_data:
        raise ConfigError(
            'data.name = "devices": only the devices have data, so this experiment runs on a fleet (anysize deploy '
            'init), not in a simulation. To simulate it, name a data set, or a "module:function" with a parameter '
            "`device` that gives one device's share"
        )
    if config.engine.name == "flower":
        engine_kind("flower")
    if config.engine.name == "flower" and config.training.stack > 1:
        raise ConfigError(
            f"training.stack = {config.training.stack}: on Flower every client trains alone; the engines inprocess "
            "and processes stack clients"
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
