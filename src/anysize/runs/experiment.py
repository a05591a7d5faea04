"""An experiment that can be run: what `anysize.Experiment` is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anysize.experiment.experiment import Experiment as Described
from anysize.runs.run import Run
from anysize.runs.runner import run


class Experiment(Described):
    """An experiment with live objects or names in any place.

    >>> experiment = Experiment(data="digits", clients=20, model="mlp", method="fedavg", rounds=2)
    >>> [size.label for size in experiment.sizes]
    ['0.25', '0.5', '0.75', '1.0']
    """

    def run(self, out: str | Path | None = None, **options: Any) -> Run:
        """Run it; see `anysize.run`, `callbacks=` included."""
        return run(self, out=out, **options)
