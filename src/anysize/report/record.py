"""What a run directory holds, read and checked once: the only file of the report that opens files.

A run may still be going on, may have been killed in the middle of a line, or may have been resumed. A torn
last line is left out; any other damage is an error that names the file and the line.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anysize.errors import CheckpointError
from anysize.records.directory import ANALYSIS, CLIENTS, CONFIG, ENVIRONMENT, EVENTS
from anysize.records.events import counted_rounds, numbered_events
from anysize.wire import load

Number = Annotated[int, Field(strict=True)] | Annotated[float, Field(strict=True)]
"""A number that is one in JSON too."""

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


class Spent(Entry):
    """What every client has spent of its privacy since the first round, and the round's clip if it moves."""

    epsilon: Number
    delta: Number
    clip: Number | None = None


class Round(Entry):
    """One round: what it cost and, if it was evaluated, how good each size was after it."""

    round: int
    scores: dict[str, Number | None] = {}
    spreads: dict[str, Number | None] = {}
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
    privacy: Spent | None = None

    def value(self, label: str, metric: str) -> Number | None:
        """A size's metric of any name after this round; None if it was not measured."""
        return self.metrics.get(label, {}).get(metric)


class Device(Entry):
    """A real device: the client that it is, and what it is called."""

    client: str
    name: str
    group: str | None = None


class Introductions(Entry):
    """Devices that came, or came back as devices of another size."""

    devices: list[Device]


class ClientScore(Entry):
    """One client's metrics on its own held-out samples, None if it has none: a line of clients.csv."""

    round: int
    client: str
    group: str
    size: str
    samples: int | float | None
    score: float | None
    loss: float | None = None


@dataclass(frozen=True)
class Record:
    """A run, as recorded in its directory.

    Attributes:
        start: what was asked for.
        rounds: every valid round, in order; of a repeated round, the last repetition.
        seconds: how long the run took, or None while it is going on.
        finished: whether the run has ended.
        stopped: why it ended before its last round, or None.
        client_scores: the latest round of clients.csv, one line per client and size.
        last_scores: the last line of clients.csv of each client, by the client.
        devices: real devices, by the client that each is.
        on_clients: whether sizes were judged on the clients' own held-out data alone: the scores of a round are then
            means over the clients of a size.
        config: the complete experiment file, as text.
        environment: versions, hardware and checksums.
        analysis: after each evaluated round, the arrays in which the method described its state.
    """

    start: Start
    rounds: tuple[Round, ...] = ()
    finished: bool = False
    stopped: str | None = None
    seconds: Number | None = None
    client_scores: tuple[ClientScore, ...] = ()
    last_scores: Mapping[str, ClientScore] = field(default_factory=dict)
    devices: Mapping[str, Device] = field(default_factory=dict)
    on_clients: bool = False
    config: str | None = None
    environment: Mapping[str, Any] | None = None
    analysis: Mapping[int, Mapping[str, NDArray[np.float64]]] = field(default_factory=dict)

    @cached_property
    def labels(self) -> list[str]:
        """The sizes, smallest first; a size that the start event does not list comes last."""
        announced = [size.label for size in self.start.sizes]
        measured = [label for round_ in self.evaluated for label in round_.scores]
        return list(dict.fromkeys(announced + measured))

    def by_size(self, names: Iterable[str]) -> list[str]:
        """These sizes or device groups once each, smallest first; what has no size in this run comes last."""
        given = list(dict.fromkeys(names))
        trained = {group.name: group.size or group.name for group in self.start.groups}
        places: dict[str | None, int] = {label: place for place, label in enumerate(self.labels)}
        return sorted(given, key=lambda name: places.get(trained.get(name, name), len(places)))

    @cached_property
    def evaluated(self) -> list[Round]:
        """The rounds after which the sizes were evaluated."""
        return [round_ for round_ in self.rounds if round_.scores]

    @cached_property
    def clients(self) -> int:
        """How many clients there are: as announced or, where nobody could know, as many as were seen."""
        announced = self.start.partition.clients if self.start.partition else 0
        answered = {str(part.client) for round_ in self.rounds for part in round_.clients}
        absent = {str(part.client) for round_ in self.rounds for part in round_.missing}
        return announced or len(answered | absent | set(self.devices))

    def called(self, client: int | str) -> str:
        """The name of a client's device, or its number."""
        device = self.devices.get(str(client))
        return f"client {client}" if device is None else device.name

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


def read(directory: Path) -> Record:
    """Everything that the report shows, from the files of a run directory.

    Raises:
        CheckpointError: the directory holds no run, or a file in it is damaged.
    """
    path = directory / EVENTS
    events = list(numbered_events(path))
    start: Start | None = None
    devices: dict[str, Device] = {}
    finished, end = False, _End()
    for line, event in events:
        where = f"{path}, line {line}"
        match event["event"]:
            case "start":
                start = _checked(Start, event, where)
            case "resume" | "round":
                finished, end = False, _End()
            case "devices":
                devices |= {device.client: device for device in _checked(Introductions, event, where).devices}
            case "end":
                finished, end = True, _checked(_End, event, where)
    if start is None:
        raise CheckpointError(f"{path} has no start event: it is not the record of a run, or the run has not begun")
    ordered = tuple(
        _checked(Round, {**event, "scores": event.get(start.metric) or {}}, f"{path}, line {line}")
        for line, event in counted_rounds(path, events)
    )
    tested = any(round_.scores for round_ in ordered)
    latest, last = _client_scores(directory / CLIENTS, start.metric, ordered)
    return Record(
        start=_counted(start, devices),
        rounds=ordered if tested else tuple(_judged_by_clients(round_, start) for round_ in ordered),
        finished=finished,
        stopped=end.stopped,
        seconds=end.seconds,
        client_scores=latest,
        last_scores=last,
        devices=devices,
        on_clients=not tested and any(round_.client_metrics for round_ in ordered),
        config=_text(directory / CONFIG),
        environment=_environment(directory / ENVIRONMENT),
        analysis=_analysis(directory / ANALYSIS, ordered),
    )


class _End(Entry):
    seconds: Number | None = None
    stopped: str | None = None


def _checked(kind: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """The values as a typed entry; all problems with them are raised as one error."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors(include_url=False)
        )
        raise CheckpointError(f"{where} is damaged: {problems}") from None


def _counted(start: Start, devices: Mapping[str, Device]) -> Start:
    """The start event; a group of unknown size gets the number of devices that came."""
    came = Counter(device.group for device in devices.values())
    groups = [g if g.clients is not None else g.model_copy(update={"clients": came.get(g.name)}) for g in start.groups]
    return start.model_copy(update={"groups": groups})


def _judged_by_clients(round_: Round, start: Start) -> Round:
    """The round; the score of a size is the mean over the clients that train it, each on its own samples."""
    trained = {group.name: group.size or group.name for group in start.groups}
    by_size: dict[str, list[GroupScore]] = {}
    for name, score in round_.client_metrics.items():
        by_size.setdefault(trained.get(name, name), []).append(score)
    means = {label: _mean(scores) for label, scores in by_size.items()}
    spreads = {label: _spread(scores, means[label]) for label, scores in by_size.items()}
    return round_.model_copy(update={"scores": means, "spreads": spreads})


def _mean(scores: Sequence[GroupScore]) -> Number | None:
    """The mean over the clients of all groups; for one group its own mean, to the last digit."""
    if len(scores) == 1:
        return scores[0].mean
    known = [(score.mean, score.clients) for score in scores if score.mean is not None and score.clients]
    return fmean(*zip(*known)) if known else None


def _spread(scores: Sequence[GroupScore], mean: Number | None) -> Number | None:
    """The standard deviation over the clients of all groups, whose mean is given."""
    if len(scores) == 1:
        return scores[0].spread
    if mean is None or any(score.mean is None or score.spread is None for score in scores):
        return None
    squares = [((s.spread or 0.0) ** 2 + ((s.mean or 0.0) - mean) ** 2, s.clients or 0) for s in scores]
    return sqrt(sum(square * number for square, number in squares) / max(sum(number for _, number in squares), 1))


def _client_scores(
    path: Path, metric: str, rounds: tuple[Round, ...]
) -> tuple[tuple[ClientScore, ...], dict[str, ClientScore]]:
    """The latest round of clients.csv, and the last line of each client; if a line is there twice, the last counts."""
    text = _text(path)
    if text is None or not rounds:
        return (), {}
    # Every complete line ends in a newline: what follows the last newline is a torn line.
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    if metric not in (reader.fieldnames or [metric]):
        raise CheckpointError(f"{path} has no column '{metric}', the metric of this run: another run wrote it")
    latest: dict[tuple[str, str], ClientScore] = {}
    last: dict[str, ClientScore] = {}
    newest = -1
    for row in _rows(reader, path):
        filled = {key: value or None for key, value in row.items() if key is not None}
        where = f"{path}, line {reader.line_num}"
        score = _checked(ClientScore, {**filled, "score": filled.get(metric)}, where)
        if score.round > rounds[-1].round:
            continue
        if score.client not in last or last[score.client].round <= score.round:
            last[score.client] = score
        if score.round > newest:
            newest, latest = score.round, {}
        if score.round == newest:
            latest[score.client, score.size] = score
    return tuple(latest.values()), last


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
    tensors, _ = load(path.read_bytes(), str(path), CheckpointError)
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
