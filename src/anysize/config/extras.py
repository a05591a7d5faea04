"""Extras: packages that only some uses of anysize need, and the command that installs them."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

_TREE = Path(__file__).parents[3]
"""The checkout, if the package is used where its sources lie."""


def needs(what: str, extra: str, *packages: str) -> str | None:
    """A sentence that says which packages are missing and how to install them; None if none is missing.

    >>> needs("a sum", "arithmetic", "math") is None
    True
    """
    missing = [package for package in packages if find_spec(package) is None]
    return f"{what} needs {', '.join(missing)}, not installed: {install_command(extra)}" if missing else None


def install_command(extra: str) -> str:
    """The command that installs an extra from the source that anysize was installed from."""
    if (_TREE / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_TREE}[{extra}]')}"
    origin = _origin()
    if origin is None:
        return f"pip install 'anysize[{extra}]'"
    local = Path(url2pathname(urlsplit(origin).path))
    if origin.startswith("file:") and local.exists():
        return f"pip install {shlex.quote(f'{local}[{extra}]')}"
    return f"pip install '.[{extra}]' in a checkout of anysize"


def _origin() -> str | None:
    """The address of the folder or file that anysize was installed from; None if that was a package index.

    Installers note it in direct_url.json: https://packaging.python.org/en/latest/specifications/direct-url/.
    """
    try:
        text = distribution("anysize").read_text("direct_url.json")
    except PackageNotFoundError:  # somebody copied the package
        return ""
    return None if text is None else str(json.loads(text)["url"])
