"""What a run directory holds, read and checked once: the only file of the report that opens files.

A run may still be going on, may have been killed in the middle of a line, or may have been resumed. A torn
last line is left out; any other damage is an error that names the file and the line.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from anysize.errors import CheckpointError
from anysize.wire import load

Number = int | float
Event = dict[str, Any]
Model = TypeVar("Model", bound="Entry")


class Entry(BaseModel):
    """A part of an event. Unknown keys are ignored: later versions may write more."""

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)


class Cost(Entry):
    """What one client computes, holds and sends; None for what was not measured."""

    parameters: Number | None = None
    macs: Number | None = None
    training_macs: Number | None = None
    activation_bytes: Number | None = None
    bytes_down: Number | None = None
    bytes_up: Number | None = None

    @property
    def traffic(self) -> Number | None:
        """The sum of the bytes down and up.

        >>> Cost(bytes_down=3, bytes_up=4).traffic
        7
        """
        return total([self.bytes_down, self.bytes_up])


class SizeCost(Cost):
    """One size of the model and its cost."""

    label: str
    inference_bytes: Number | None = None


class Group(Cost):
    """One device group: the size that it trains, and why."""

    name: str
    size: str | None = None
    clients: Number | None = None
    capacity: Number | None = None
    budget: dict[str, Number | None] | None = None


class Partition(Entry):
    """How the samples are spread over the clients; only the first few clients are listed."""

    clients: int
    class_names: list[str] | None = None
    samples: list[Number] = []
    histogram: list[list[Number]] | None = None


class Start(Entry):
    """What was asked for: the first event of a run."""

    name: str
    method: str
    model: str
    data: str
    rounds: int
    seed: int
    metric: str = "accuracy"
    higher_is_better: bool = True
    sizes: list[SizeCost] = []
    groups: list[Group] = []
    parts: dict[str, Number] = {}
    partition: Partition | None = None
    notices: list[str] = []


class Participation(Entry):
    """One client's participation in one round."""

    client: int | str
    group: str | None = None
    size: str | None = None
    samples: Number | None = None
    domain: str | None = None
    parts: list[str] = []


class Missing(Entry):
    """A client whose answer was missing or wrong in a round: which job it had, and what was wrong."""

    client: int | str
    why: str
    task: str = "train"


class GroupScore(Entry):
    """The metric of one device group's clients, each on its own held-out samples."""

    mean: Number | None = None
    worst_decile: Number | None = None
    spread: Number | None = None
    clients: Number | None = None


class TradeOff(Entry):
    """The metric of one size, clean and under attack, at one level of robustness (None if there is no choice)."""

    robustness: Number | None = None
    standard: Number | None = None
    robust: Number | None = None


class Round(Entry):
    """One round: what it cost and, if it was evaluated, how good each size was after it."""

    round: int
    scores: dict[str, Number | None] = {}
    metrics: dict[str, dict[str, Number | None]] = {}
    train_loss: Number | None = None
    bytes_down: Number | None = None
    bytes_up: Number | None = None
    virtual_seconds: Number | None = None
    clients: list[Participation] = []
    client_metrics: dict[str, GroupScore] = {}
    profile: dict[str, Number] = {}
    robust: dict[str, list[TradeOff]] = {}
    missing: list[Missing] = []
    void: bool = False

    def value(self, label: str, metric: str) -> Number | None:
        """A size's metric of any name after this round; None if it was not measured."""
        return self.metrics.get(label, {}).get(metric)


class ClientScore(Entry):
    """A line of clients.csv: one client's metric on its own held-out samples, None if it has none."""

    round: int
    client: str
    group: str
    size: str
    samples: Number | None
    score: float | None


@dataclass(frozen=True)
class Record:
    """A run, as recorded in its directory.

    Attributes:
        start: what was asked for.
        rounds: every valid round, in order; of a repeated round, the last repetition.
        seconds: how long the run took, or None while it is going on.
        finished: whether the run has ended.
        client_scores: the latest round of clients.csv, one line per client and size.
        config: the complete experiment file, as text.
        environment: versions, hardware and checksums.
        analysis: after each evaluated round, the arrays in which the method described its state.
    """

    start: Start
    rounds: tuple[Round, ...] = ()
    finished: bool = False
    seconds: Number | None = None
    client_scores: tuple[ClientScore, ...] = ()
    config: str | None = None
    environment: Mapping[str, Any] | None = None
    analysis: Mapping[int, Mapping[str, NDArray[np.float64]]] = field(default_factory=dict)

    @cached_property
    def labels(self) -> list[str]:
        """The sizes, smallest first; a size that the start event does not list comes last."""
        announced = [size.label for size in self.start.sizes]
        measured = [label for round_ in self.evaluated for label in round_.scores]
        return list(dict.fromkeys(announced + measured))

    @cached_property
    def evaluated(self) -> list[Round]:
        """The rounds after which the sizes were evaluated."""
        return [round_ for round_ in self.rounds if round_.scores]

    @property
    def latest(self) -> Round | None:
        """The last evaluated round, at which sizes are compared: no round is selected on test data."""
        return self.evaluated[-1] if self.evaluated else None


def total(values: Iterable[Number | None]) -> Number | None:
    """The sum, or None if a value is unknown: an unknown value is not zero.

    >>> total([1, 2]), total([1, None])
    (3, None)
    """
    known: Number = 0
    for value in values:
        if value is None:
            return None
        known += value
    return known


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
    return [event for _, event in _numbered_events(path)]


def read(directory: Path) -> Record:
    """Everything that the report shows, from the files of a run directory.

    Raises:
        CheckpointError: the directory holds no run, or a file in it is damaged.
    """
    path = directory / "events.jsonl"
    start: Start | None = None
    rounds: dict[int, Round] = {}
    finished, seconds = False, None
    for line, event in _numbered_events(path):
        where = f"{path}, line {line}"
        match event["event"]:
            case "start":
                start = _checked(Start, event, where)
            case "resume":
                finished, seconds = False, None
                rounds = _until(rounds, event.get("round"))
            case "round":
                finished, seconds = False, None
                round_ = _checked(Round, _with_scores(event, start), where)
                rounds[round_.round] = round_
            case "end":
                finished, seconds = True, _checked(_End, event, where).seconds
    if start is None:
        raise CheckpointError(f"{path} has no start event: it is not the record of a run, or the run has not begun")
    ordered = tuple(rounds[number] for number in sorted(rounds))
    return Record(
        start=start,
        rounds=ordered,
        finished=finished,
        seconds=seconds,
        client_scores=_client_scores(directory / "clients.csv", start.metric, ordered),
        config=_text(directory / "config.toml"),
        environment=_environment(directory / "environment.json"),
        analysis=_analysis(directory / "analysis", ordered),
    )


class _End(Entry):
    seconds: Number | None = None


def _numbered_events(path: Path) -> Iterator[tuple[int, Event]]:
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


def _checked(kind: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """The values as a typed entry; all problems with them are raised as one error."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors(include_url=False)
        )
        raise CheckpointError(f"{where} is damaged: {problems}") from None


def _with_scores(event: Event, start: Start | None) -> Event:
    """The round with its main metric under one key: in the file the key is the metric's own name."""
    metric = "accuracy" if start is None else start.metric
    return {**event, "scores": event.get(metric) or {}}


def _until(rounds: Mapping[int, Round], last: object) -> dict[int, Round]:
    """The rounds up to where a resumed run continued; later ones were lost together with their state."""
    if not isinstance(last, int):
        return dict(rounds)
    return {number: round_ for number, round_ in rounds.items() if number <= last}


def _client_scores(path: Path, metric: str, rounds: tuple[Round, ...]) -> tuple[ClientScore, ...]:
    """The latest round of clients.csv; if a client was evaluated twice in it, the last line counts."""
    text = _text(path)
    if text is None or not rounds:
        return ()
    # Every complete line ends in a newline: what follows the last newline is a torn line.
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    if metric not in (reader.fieldnames or [metric]):
        raise CheckpointError(f"{path} has no column '{metric}', the metric of this run: another run wrote it")
    latest: dict[tuple[str, str], ClientScore] = {}
    newest = -1
    for row in _rows(reader, path):
        filled = {key: value or None for key, value in row.items() if key is not None}
        where = f"{path}, line {reader.line_num}"
        score = _checked(ClientScore, {**filled, "score": filled.get(metric)}, where)
        if not newest <= score.round <= rounds[-1].round:
            continue
        if score.round > newest:
            newest, latest = score.round, {}
        latest[score.client, score.size] = score
    return tuple(latest.values())


def _rows(reader: csv.DictReader[str], path: Path) -> Iterator[dict[str, str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise CheckpointError(f"{path}, line {reader.line_num} is damaged: {error}") from None


def _text(path: Path) -> str | None:
    """The file's text, or None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None


def _analysis(folder: Path, rounds: tuple[Round, ...]) -> dict[int, dict[str, NDArray[np.float64]]]:
    """The arrays of every file whose name is the number of a valid round."""
    counted = {round_.round for round_ in rounds}
    paths = [
        path for path in sorted(folder.glob("*.safetensors")) if path.stem.isdecimal() and int(path.stem) in counted
    ]
    return {int(path.stem): _arrays(path) for path in paths}


def _arrays(path: Path) -> dict[str, NDArray[np.float64]]:
    tensors, _ = load(path.read_bytes(), str(path))
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def _environment(path: Path) -> dict[str, Any] | None:
    text = _text(path)
    if text is None:
        return None
    try:
        environment = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not isinstance(environment, dict):
        raise CheckpointError(f"{path} is damaged: expected a JSON object, found {type(environment).__name__}")
    return environment
