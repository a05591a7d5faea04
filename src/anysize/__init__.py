"""Train one model across devices of every size, and deploy it at any size.

    import anysize as az

    run = az.run("experiment.toml")
    small = run.customize(size=0.25)        # an ordinary nn.Module
"""

from anysize import methods
from anysize.config import load as load_config
from anysize.context import Context, Size
from anysize.customize import export
from anysize.data import Data, Share
from anysize.devices import Budget
from anysize.elastic.axes import Axes, trace
from anysize.elastic.slicing import narrow
from anysize.errors import AnysizeError
from anysize.experiment import Experiment
from anysize.methods import Method
from anysize.run import Run, load, run
from anysize.tasks import Task

__all__ = [
    "AnysizeError",
    "Axes",
    "Budget",
    "Context",
    "Data",
    "Experiment",
    "Method",
    "Run",
    "Share",
    "Size",
    "Task",
    "export",
    "load",
    "load_config",
    "methods",
    "narrow",
    "run",
    "trace",
]
