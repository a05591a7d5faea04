"""The events of a run, and how far it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anysize.errors import CheckpointError
from anysize.runs.directory import EVENTS, saved_config
from anysize.wire import Json

Event = dict[str, Any]


def history(directory: Path) -> list[Json]:
    """The round events of a run directory, one for each round: of a repeated round the last counts."""
    rounds: dict[int, Json] = {}
    for event in read_events(directory / EVENTS):
        if event["event"] == "resume":
            rounds = {number: old for number, old in rounds.items() if number <= event["round"]}
        if event["event"] == "round":
            rounds[event["round"]] = event
    return [rounds[number] for number in sorted(rounds)]


def status(directory: Path) -> Json:
    """How far a run is: its last finished round, its latest metrics, and which devices take part."""
    config = saved_config(directory)
    events = read_events(directory / EVENTS)
    start = next((event for event in events if event["event"] == "start"), {"metric": "accuracy"})
    rounds = history(directory)
    done = rounds[-1]["round"] if rounds else 0
    evaluated = next((event for event in reversed(rounds) if start["metric"] in event), None)
    judged = next((event for event in reversed(rounds) if event.get("client_metrics")), None)
    late = next((event for event in reversed(rounds) if event.get("missing")), None)
    met = [about for event in events if event["event"] == "devices" for about in event["devices"]]
    return {
        "name": config.name,
        "round": done,
        "rounds": config.rounds,
        "state": "finished" if done >= config.rounds else "not finished",
        "metric": start["metric"],
        "evaluated": evaluated["round"] if evaluated else None,
        "latest": evaluated[start["metric"]] if evaluated else {},
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
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        return event
    return None
