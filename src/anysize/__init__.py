"""Train one model across devices of every size, and deploy it at any size.

>>> import anysize as az
>>> experiment = az.Experiment(data="digits", clients=20, model="small-cnn", method="flanc", rounds=40)
>>> [size.label for size in experiment.sizes]  # experiment.run().customize(size=0.25) is an ordinary nn.Module
['0.25', '0.5', '0.75', '1.0']

Names are imported when they are first used, so that the command line can print its help without loading PyTorch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anysize import methods
    from anysize.comparison import Comparison, compare
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
    "Comparison",
    "Context",
    "Data",
    "Experiment",
    "Method",
    "Run",
    "Share",
    "Size",
    "Task",
    "compare",
    "export",
    "load",
    "load_config",
    "methods",
    "narrow",
    "run",
    "trace",
]

_HOMES = {
    "anysize.comparison": ("Comparison", "compare"),
    "anysize.context": ("Context", "Size"),
    "anysize.customize": ("export",),
    "anysize.data": ("Data", "Share"),
    "anysize.devices": ("Budget",),
    "anysize.elastic.axes": ("Axes", "trace"),
    "anysize.elastic.slicing": ("narrow",),
    "anysize.errors": ("AnysizeError",),
    "anysize.experiment": ("Experiment",),
    "anysize.methods": ("Method",),
    "anysize.run": ("Run", "load"),
    "anysize.tasks": ("Task",),
}


def __getattr__(name: str) -> Any:
    if name == "methods":
        return import_module("anysize.methods")
    if name == "load_config":
        return import_module("anysize.config").load
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'anysize' has no attribute '{name}'")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `anysize.run` the function: importing the module `anysize.run` would put that in its place."""

    @property
    def run(self) -> Any:
        return import_module("anysize.run").run

    @run.setter
    def run(self, module: ModuleType) -> None: ...


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Package
