"""Train one model across devices of every size, and deploy it at any size.

>>> import anysize as az
>>> experiment = az.Experiment(data="digits", clients=20, model="small-cnn", method="flanc", rounds=40)
>>> [size.label for size in experiment.sizes]  # experiment.run().customize(size=0.25) is an ordinary nn.Module
['0.25', '0.5', '0.75', '1.0']

`__init__.pyi` lists the public names. They are imported when they are first used, so that the command line can print
its help without loading PyTorch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _homes() -> dict[str, str]:
    """The module of every public name, from the imports of the stub."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}


_HOMES = _homes()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'anysize' has no attribute '{name}'")
    if _HOMES[name] == __name__:
        return import_module(f"{__name__}.{name}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
