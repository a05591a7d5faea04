"""Runs shown in TensorBoard, Weights & Biases or MLflow; each is imported only by a run that asks for it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anysize.callbacks.base import Callback, Evaluation, RunView
from anysize.config.extras import needs
from anysize.config.files import dumps
from anysize.config.toml import flat
from anysize.errors import ConfigError

if TYPE_CHECKING:
    from anysize.config.tables import ExperimentConfig

FOLDER = "tensorboard"
"""Where the run directory holds the files of TensorBoard."""

_OF_ROUNDS = ("train_loss", "bytes_down", "bytes_up", "seconds", "virtual_seconds")
_ID = "anysize.id"
_MOST_PARAMETERS = 100  # of one call of MLflow


def readings(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round that are not of any size, by the names under which trackers show them."""
    return _finite({name: event.get(name) for name in _OF_ROUNDS})


def scores(evaluation: Evaluation, metric: str) -> dict[str, float]:
    """The metrics of an evaluation, by the names under which trackers show them.

    >>> scores(Evaluation(4, {"0.5": {"accuracy": 0.9}}, {"0.5": 0.8}, 0.8), "accuracy")
    {'test/accuracy/0.5': 0.9, 'held_out/accuracy/0.5': 0.8, 'held_out/accuracy/mean': 0.8}
    """
    found = {f"test/{name}/{size}": value for size, own in evaluation.test.items() for name, value in own.items()}
    found |= {f"held_out/{metric}/{size}": value for size, value in evaluation.held_out.items()}
    return _finite(found | {f"held_out/{metric}/mean": evaluation.held_out_mean})


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


class Tracker(Callback):
    """A listener that sends a run's numbers to another program.

    A subclass says how: `open` a run, `log` numbers of a round, `close`.
    """

    package: ClassVar[str] = ""
    """What must be installed, which is also the name of the extra; empty: nothing."""

    def check(self, config: ExperimentConfig) -> None:
        if not self.package:
            return
        if (missing := needs(f"the tracker {type(self).__name__}", self.package, self.package)) is not None:
            raise ConfigError(missing)

    def on_start(self, run: RunView) -> None:
        self.open(run)

    def on_round(self, run: RunView) -> None:
        self.log(readings(run.event), run.round)

    def on_evaluation(self, run: RunView) -> None:
        self.log(scores(run.evaluations[-1], run.metric), run.round)

    def on_end(self, run: RunView) -> None:
        self.close()

    def open(self, run: RunView) -> None:
        """Begin, or go on with a run that is resumed."""
        raise NotImplementedError

    def log(self, values: Mapping[str, float], round: int) -> None:
        """Send some numbers of a round."""
        raise NotImplementedError

    def close(self) -> None:
        """End the run."""
        raise NotImplementedError


@dataclass
class TensorBoard(Tracker):
    """Writes the run's numbers for TensorBoard: `tensorboard --logdir runs` shows all runs.

    Attributes:
        folder: where; by default the folder `tensorboard` of the run directory.
    """

    folder: str | None = None
    package: ClassVar[str] = "tensorboard"

    def check(self, config: ExperimentConfig) -> None:
        super().check(config)
        if self.folder is None:
            return
        if not isinstance(self.folder, str) or not self.folder:
            raise ConfigError(f"track.options.folder: given {self.folder!r}, must be the path of a folder")
        place = config.path(self.folder)
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"track.options.folder: cannot make {place}: {error.strerror or error}") from None

    def open(self, run: RunView) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = run.directory / FOLDER if self.folder is None else run.config.path(self.folder)
        # What a killed run wrote of rounds that are repeated now is not shown.
        self._writer: Any = SummaryWriter(str(place), purge_step=run.round + 1)
        if run.round == 0:
            self._writer.add_text("experiment", _as_code(dumps(run.config)), 0)

    def log(self, values: Mapping[str, float], round: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@dataclass
class WandB(Tracker):
    """Sends the run's numbers to Weights & Biases; its environment variables (WANDB_MODE, ...) hold here too.

    Attributes:
        project: the project.
        entity: the user or team; by default your own.
        mode: "online", "offline" or "disabled"; by default as WANDB_MODE says. Files lie in the run directory.
    """

    project: str = "anysize"
    entity: str | None = None
    mode: str | None = None
    package: ClassVar[str] = "wandb"

    def open(self, run: RunView) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            id=run.id,
            resume="allow",
            name=run.config.name,
            dir=str(run.directory),
            config=run.config.to_dict(),
        )

    def log(self, values: Mapping[str, float], round: int) -> None:
        self._run.log(dict(values), step=round)

    def close(self) -> None:
        self._run.finish()


@dataclass
class MLflow(Tracker):
    """Sends the run's numbers to MLflow.

    Attributes:
        experiment: the experiment of MLflow.
        tracking_uri: its store or server; by default as MLFLOW_TRACKING_URI says, or MLflow's own default.
    """

    experiment: str = "anysize"
    tracking_uri: str | None = None
    package: ClassVar[str] = "mlflow"

    def open(self, run: RunView) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(self.tracking_uri)
        known = self._client.get_experiment_by_name(self.experiment)
        place = known.experiment_id if known is not None else self._client.create_experiment(self.experiment)
        before = self._client.search_runs([place], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        if before:
            self._run = before[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        made = self._client.create_run(place, tags={_ID: run.id}, run_name=run.config.name)
        self._run = made.info.run_id
        parameters = [Param(_allowed(key), str(value)) for key, value in flat(run.config.to_dict()).items()]
        for some in _in_parts(parameters, _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=some)

    def log(self, values: Mapping[str, float], round: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(_allowed(name), v, now, round) for name, v in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _allowed(name: str) -> str:
    """A name as MLflow allows it.

    >>> _allowed("devices.groups[0].name")
    'devices.groups_0_.name'
    """
    return re.sub(r"[^\w./ -]", "_", name)


def _in_parts(values: list[Any], most: int) -> Iterator[list[Any]]:
    for first in range(0, len(values), most):
        yield values[first : first + most]


def _as_code(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
