"""What a finished run measured and spent, read from the files of its directory; no network is built for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from anysize.config.tables import ExperimentConfig
from anysize.errors import CheckpointError
from anysize.records.directory import EVENTS, saved_config
from anysize.records.events import held_out_by_size, held_out_mean, history, known, read_events
from anysize.wire import Json

COSTS = (
    "parameters",
    "macs",
    "training_macs",
    "activation_bytes",
    "bytes_down",
    "bytes_up",
    "inference_bytes",
    "nonzero_macs",
)
"""What is known of the cost of a size: the fields of `anysize.cost.count.Cost`."""

_TAIL_BYTES = 4096  # the end event is a short line, unless the run was profiled: that has a dozen stages


@dataclass(frozen=True)
class Outcome:
    """A finished run as a comparison sees it.

    Attributes:
        path: of its directory, as it is shown.
        directory: where it is.
        setting: the name of the cell's setting.
        label: what its method is called.
        config: the complete experiment.
        start: its first event.
        rounds: its round events.
        tuned: the values that were chosen for it, by dotted key.
    """

    path: str
    directory: Path
    setting: str
    label: str
    config: ExperimentConfig
    start: Json
    rounds: Sequence[Json]
    tuned: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def metric(self) -> str:
        return str(self.start["metric"])

    @property
    def higher_is_better(self) -> bool:
        return bool(self.start["higher_is_better"])

    @cached_property
    def judged_on(self) -> str:
        """ "test", or "clients": whose held-out data judged it."""
        return "test" if any(self.metric in event for event in self.rounds) else "clients"

    @cached_property
    def costs(self) -> dict[str, dict[str, int]]:
        """What each size costs, by its label."""
        return {size["label"]: {key: int(size.get(key) or 0) for key in COSTS} for size in self.start["sizes"]}

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Per size the metric after every round that was evaluated, smallest size first."""
        found: dict[str, list[tuple[int, float]]] = {label: [] for label in self.costs}
        for event in self.rounds:
            for label, value in scores(event, self.start, self.judged_on).items():
                found.setdefault(label, []).append((event["round"], value))
        return {label: curve for label, curve in found.items() if curve}

    @cached_property
    def mean_curve(self) -> list[tuple[int, float]]:
        """The mean over the sizes after every round that was evaluated."""
        by_round: dict[int, list[float]] = {}
        for curve in self.curves.values():
            for number, value in curve:
                by_round.setdefault(number, []).append(value)
        return [(number, sum(values) / len(values)) for number, values in sorted(by_round.items())]

    @cached_property
    def spent(self) -> dict[int, dict[str, float]]:
        """By round, what all rounds until then cost: bytes both ways, and multiply-adds of the clients' training."""
        found, sent, trained = dict[int, dict[str, float]](), 0.0, 0.0
        for event in self.rounds:
            sent += event["bytes_down"] + event["bytes_up"]
            trained += sum(self._training_macs(client) for client in event["clients"])
            found[event["round"]] = {"bytes": sent, "training_macs": trained}
        return found

    @property
    def participants(self) -> list[tuple[int, ...]]:
        """Who took part in each round."""
        return [tuple(sorted(client["client"] for client in event["clients"])) for event in self.rounds]

    def _training_macs(self, client: Json) -> float:
        training = self.config.training
        steps = None if training.local_steps is None else training.local_steps * training.batch_size
        seen = steps or (client.get("samples") or 0) * (training.local_epochs or 1)
        return float(seen * self.costs.get(client["size"], {}).get("training_macs", 0))


def read(
    directory: Path, setting: str = "", label: str = "", path: str = "", tuned: Mapping[str, Any] | None = None
) -> Outcome:
    """The finished run in a directory; by default labelled with its method's name."""
    config = saved_config(directory)
    start = next((event for event in read_events(directory / EVENTS) if event["event"] == "start"), None)
    if start is None or "metric" not in start:
        raise CheckpointError(f"{directory / EVENTS} has no start event that names the metric; run it again")
    found = history(directory)
    made = Outcome(
        path or str(directory), directory, setting, label or config.method.name, config, start, found, dict(tuned or {})
    )
    if not made.curves:
        raise CheckpointError(f"{directory}: no round of it was evaluated, so there is nothing to compare")
    return made


def scores(event: Json, start: Json, judged_on: str) -> dict[str, float]:
    """The metric of a round by size: on the test set, or the mean over the clients that have the size."""
    if judged_on == "test":
        return {label: known(value) for label, value in event.get(start["metric"], {}).items()}
    return held_out_by_size(event, start)


def held_out(directory: Path) -> float:
    """The mean of the metric over all clients, each on its own held-out data, when they were last asked."""
    events = [event for event in history(directory) if event.get("client_metrics")]
    if not events:
        raise CheckpointError(f"{directory}: no client has judged it, so nothing can be chosen by it")
    return held_out_mean(events[-1])


def is_finished(directory: Path, rounds: int) -> bool:
    """Whether the run in a directory has ended after that many rounds, or was stopped before by a callback."""
    end = end_of(directory)
    return end is not None and (end["round"] == rounds or "stopped" in end)


def end_of(directory: Path) -> Json | None:
    """The last event of the run in a directory; None if it has not ended."""
    path = directory / EVENTS
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    try:
        event = json.loads(last)
    except ValueError:
        return None  # a long or a torn line, which the last event of a finished run is not
    return event if isinstance(event, dict) and event.get("event") == "end" else None
