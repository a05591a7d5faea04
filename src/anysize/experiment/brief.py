"""What another process must know about an experiment: a worker, a node, a device, or one that loads a finished run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from anysize import config as configs
from anysize.config.tables import CallbacksConfig, ExperimentConfig, TrackConfig
from anysize.errors import TrustError, short
from anysize.experiment.experiment import Experiment
from anysize.experiment.signature import Known, Signature
from anysize.methods.size import Size
from anysize.wire import Json


@dataclass(frozen=True)
class Brief:
    """An experiment without its data and weights: its complete file, and what it found in the data.

    Attributes:
        config: the complete file.
        known: what a network must know about the data, and the sizes that the fleet trains.
    """

    config: ExperimentConfig
    known: Known

    @classmethod
    def of(cls, experiment: Experiment) -> Brief:
        """The brief of an experiment; what is done between rounds concerns the server alone."""
        config = experiment.complete.replaced(callbacks=CallbacksConfig(), track=TrackConfig())
        return cls(config, Known(experiment.signature, experiment.sizes))

    def to_json(self) -> Json:
        """The brief as JSON; `from_json` is the inverse."""
        return {"config": configs.dumps(self.config), **self.found()}

    def found(self) -> Json:
        """What the file does not hold, as JSON: a checkpoint holds it."""
        return {
            "signature": self.known.signature.to_json(),
            "sizes": [asdict(size) for size in self.known.sizes],
        }

    @classmethod
    def from_json(cls, told: Any, read: Callable[[str], ExperimentConfig]) -> Brief:
        """The brief that another process sent or wrote.

        Args:
            told: the JSON of `to_json`.
            read: turns the file's text into a config; a device refuses here what it does not allow.

        Raises:
            TrustError: it is not a valid brief.
        """
        missing = [key for key in ("config", "signature", "sizes") if not isinstance(told, dict) or key not in told]
        if missing:
            raise TrustError(f"{short(told)} describes no experiment: {', '.join(missing)} missing")
        return cls(read(str(told["config"])), known_in(told))

    def experiment(self, **live: Any) -> Experiment:
        """The experiment; `live` holds objects that the file cannot name, such as data in shared memory."""
        return Experiment.from_config(self.config, self.known, **live)


def known_in(told: Json) -> Known:
    """What `Brief.found` told.

    Raises:
        TrustError: it does not describe data, or no network can have such sizes.

    >>> from anysize.experiment.signature import Signature
    >>> about = Signature((1, 8, 8), False, (), True, 10, 10, None, None, None)
    >>> told = {"signature": about.to_json(), "sizes": [{"width": 1.0}, {"width": 0.25}]}
    >>> [size.label for size in known_in(told).sizes]
    ['0.25', '1.0']
    """
    try:
        signature = Signature.from_json(told["signature"])
        sizes = sorted((Size(**size) for size in told["sizes"]), key=lambda size: size.order)
        fine = all(0 < size.width <= 1 and 0 <= size.mask < 1 and (size.depth or 1) >= 1 for size in sizes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrustError(f"{short(told)} describes no experiment ({error})") from None
    if not sizes or not fine:
        raise TrustError(f"no network can have the sizes {short(told['sizes'])}")
    return Known(signature, tuple(sizes))
