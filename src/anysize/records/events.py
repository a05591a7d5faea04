"""The events of a run, and its progress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anysize.callbacks.base import Evaluation
from anysize.config.tables import ExperimentConfig
from anysize.errors import CheckpointError
from anysize.records.directory import EVENTS, saved_config
from anysize.wire import Json, parsed

Event = dict[str, Any]


def history(directory: Path) -> list[Json]:
    """The event of every round in a run directory that counts, in order."""
    path = directory / EVENTS
    return [event for _, event in counted_rounds(path, numbered_events(path))]


def counted_rounds(path: Path, events: Iterable[tuple[int, Event]]) -> list[tuple[int, Event]]:
    """The round events that count, in order of their rounds, each with the number of its line.

    A resumed run continues from a checkpoint: later rounds are lost with their state. Of a repeated round, the last
    repetition counts.

    >>> events = [{"event": "round", "round": 1}, {"event": "round", "round": 2}, {"event": "resume", "round": 1}]
    >>> counted_rounds(Path("events.jsonl"), enumerate(events, 1))
    [(1, {'event': 'round', 'round': 1})]
    """
    rounds: dict[int, tuple[int, Event]] = {}
    for line, event in events:
        if event["event"] not in ("round", "resume"):
            continue
        number = event.get("round")
        if type(number) is not int:
            raise CheckpointError(f"{path}, line {line} is damaged: round = {number!r} is not a whole number")
        if event["event"] == "round":
            rounds[number] = line, event
        else:
            rounds = {earlier: found for earlier, found in rounds.items() if earlier <= number}
    return [rounds[number] for number in sorted(rounds)]


def by_round_and_size(directory: Path) -> list[Json]:
    """A row for each round and size of a run: its metrics where it was evaluated, and what the whole round had.

    Raises:
        CheckpointError: the events are damaged.
    """
    with _intact(directory):
        return _rows(directory)


@contextmanager
def _intact(directory: Path) -> Iterator[None]:
    """Inside, an event that lacks something, or has something else there, is an error that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
        raise CheckpointError(
            f"{directory / EVENTS} is damaged ({type(error).__name__}: {error}); restore an intact copy of it"
        ) from error


def _rows(directory: Path) -> list[Json]:
    start = next(event for event in read_events(directory / EVENTS) if event["event"] == "start")
    of_rounds = ("train_loss", "bytes_down", "bytes_up", "seconds")
    events = history(directory)
    measured = [evaluation_in(event, start) or Evaluation(event["round"]) for event in events]
    metrics = dict.fromkeys((name for found in measured for own in found.test.values() for name in own), math.nan)
    judged = any(found.held_out for found in measured)
    rows = []
    for event, found in zip(events, measured):
        whole = {name: None if event.get(name) is None else known(event[name]) for name in of_rounds}
        for label in dict.fromkeys([*(size["label"] for size in start["sizes"]), *found.held_out]):
            own = {"held_out": found.held_out.get(label, math.nan)} if judged else {}
            tested = metrics | dict(found.test.get(label, {}))
            rows.append({"round": event["round"], "size": label} | tested | own | whole)
    return rows


def evaluation_in(event: Json, start: Json) -> Evaluation | None:
    """What a round's event says about the sizes; None if the round was not evaluated."""
    if start["metric"] not in event and "client_metrics" not in event:
        return None
    metrics: dict[str, Json] = event.get("metrics", {})
    test = {label: {name: known(value) for name, value in own.items()} for label, own in metrics.items()}
    return Evaluation(event["round"], test, held_out_by_size(event, start), held_out_mean(event))


def held_out_by_size(event: Json, start: Json) -> dict[str, float]:
    """The metric of a round by size: the mean over the clients that have the size, on their own held-out data.

    >>> start = {"metric": "accuracy", "groups": [{"name": "a", "size": "0.5"}, {"name": "b", "size": "0.5"}]}
    >>> judged = {"a": {"mean": 0.4, "clients": 1}, "b": {"mean": 0.7, "clients": 2}}
    >>> held_out_by_size({"client_metrics": judged}, start)
    {'0.5': 0.6}
    """
    size_of = {group["name"]: group["size"] or group["name"] for group in start["groups"]}
    by_size: dict[str, dict[str, Json]] = {}
    for group, judged in event.get("client_metrics", {}).items():
        by_size.setdefault(size_of.get(group, group), {})[group] = judged
    return {label: held_out_mean({"client_metrics": judged}) for label, judged in by_size.items()}


def held_out_mean(event: Json) -> float:
    """The metric of a round as a mean over all clients that were asked; NaN if none was."""
    judged = event.get("client_metrics", {}).values()
    clients = sum(own["clients"] for own in judged)
    return sum(known(own["mean"]) * own["clients"] for own in judged) / clients if clients else math.nan


def known(value: float | None) -> float:
    """A number of an event, where null stands for one that is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise TypeError(f"{value!r} is not a number")
    return math.nan if value is None else float(value)


def status(directory: Path) -> Json:
    """The progress of a run: its last finished round, its latest metrics, and its devices.

    Raises:
        CheckpointError: the events are damaged.
    """
    config = saved_config(directory)
    with _intact(directory):
        return _progress(directory, config)


def _progress(directory: Path, config: ExperimentConfig) -> Json:
    events = read_events(directory / EVENTS)
    start = next((event for event in events if event["event"] == "start"), {"metric": "accuracy"})
    rounds = history(directory)
    done = rounds[-1]["round"] if rounds else 0
    evaluated = next((event for event in reversed(rounds) if start["metric"] in event), None)
    judged = next((event for event in reversed(rounds) if event.get("client_metrics")), None)
    late = next((event for event in reversed(rounds) if event.get("missing")), None)
    kept = next((event for event in reversed(events) if event["event"] == "kept"), None)
    stopped = events[-1].get("stopped") if events and events[-1]["event"] == "end" else None
    met = [about for event in events if event["event"] == "devices" for about in event["devices"]]
    latest = evaluated[start["metric"]] if evaluated else {}
    for score in latest.values():
        known(score)
    return {
        "name": config.name,
        "round": done,
        "rounds": config.rounds,
        "state": "finished" if done >= config.rounds or stopped else "not finished",
        "stopped": stopped,
        "best": kept["round"] if kept else None,
        "metric": start["metric"],
        "evaluated": evaluated["round"] if evaluated else None,
        "latest": latest,
        "clients_evaluated": judged["round"] if judged else None,
        "clients_latest": judged["client_metrics"] if judged else {},
        "devices": sorted({about["client"]: about for about in met}.values(), key=lambda about: int(about["client"])),
        "missing": sum(len(event.get("missing", [])) for event in rounds),
        "void": [event["round"] for event in rounds if event.get("void")],
        "last_missing": {"round": late["round"], "missing": late["missing"]} if late else None,
    }


def read_events(path: Path) -> list[Event]:
    """The events of a run, in the order of the file; a torn last line is left out.

    Raises:
        CheckpointError: the file is missing, or a line before the last is not an event.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "events.jsonl"
    >>> _ = path.write_text('{"event": "resume", "round": 12}\\n{"event": "rou')
    >>> read_events(path)
    [{'event': 'resume', 'round': 12}]
    """
    return [event for _, event in numbered_events(path)]


def numbered_events(path: Path) -> Iterator[tuple[int, Event]]:
    """Each event with the number of its line, counted from one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CheckpointError(
            f"cannot read {path} ({reason}): give a directory that `anysize run` has written"
        ) from None
    # Only a newline ends an event: JSON text may hold other characters that Unicode counts as line ends.
    lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    for number, line in lines:
        event = _event(line)
        if event is not None:
            yield number, event
        elif number != lines[-1][0]:
            raise CheckpointError(
                f'{path}, line {number} is damaged: not a JSON object with an "event". '
                "Repair or delete that line, or start the run again"
            )


def _event(line: bytes) -> Event | None:
    """The event that a line holds, or None if it does not hold one."""
    try:
        event = parsed(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        return event
    return None
