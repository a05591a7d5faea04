"""Train one model across devices of every size, and deploy it at any size.

>>> import anysize as az
>>> experiment = az.Experiment(data="digits", clients=20, model="small-cnn", method="flanc", rounds=40)
>>> [size.label for size in experiment.sizes]  # experiment.run().customize(size=0.25) is an ordinary nn.Module
['0.25', '0.5', '0.75', '1.0']

Names are imported when they are first used, so that the command line can print its help without loading PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; a test compares it with the list below
    from anysize import methods as methods
    from anysize.config import load as load_config  # noqa: F401
    from anysize.data import Data as Data
    from anysize.data import Share as Share
    from anysize.devices.budget import Budget as Budget
    from anysize.elastic.axes import Axes as Axes
    from anysize.elastic.axes import trace as trace
    from anysize.elastic.slicing import narrow as narrow
    from anysize.errors import AnysizeError as AnysizeError
    from anysize.exports.formats import export as export
    from anysize.methods import Method as Method
    from anysize.methods.context import Context as Context
    from anysize.methods.size import Size as Size
    from anysize.runs.comparison import Comparison as Comparison
    from anysize.runs.comparison import compare as compare
    from anysize.runs.experiment import Experiment as Experiment
    from anysize.runs.run import Run as Run
    from anysize.runs.run import load as load
    from anysize.runs.runner import run as run
    from anysize.tasks import Task as Task

_PUBLIC = {
    "AnysizeError": "anysize.errors",
    "Axes": "anysize.elastic.axes",
    "Budget": "anysize.devices.budget",
    "Comparison": "anysize.runs.comparison",
    "Context": "anysize.methods.context",
    "Data": "anysize.data",
    "Experiment": "anysize.runs.experiment",
    "Method": "anysize.methods",
    "Run": "anysize.runs.run",
    "Share": "anysize.data",
    "Size": "anysize.methods.size",
    "Task": "anysize.tasks",
    "compare": "anysize.runs.comparison",
    "export": "anysize.exports.formats",
    "load": "anysize.runs.run",
    "load_config": "anysize.config:load",
    "methods": "anysize.methods:",
    "narrow": "anysize.elastic.slicing",
    "run": "anysize.runs.runner",
    "trace": "anysize.elastic.axes",
}
"""Where each public name lives: a module, and after a colon the name there if it is another; none is the module."""

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'anysize' has no attribute '{name}'")
    home, colon, there = _PUBLIC[name].partition(":")
    module = import_module(home)
    return getattr(module, there or name) if there or not colon else module


def __dir__() -> list[str]:
    return __all__
