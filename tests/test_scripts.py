"""Scripts outside the package, which no other test runs, name only what the package has."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [path for room in ("benchmarks", "experiments", "examples", "docs") for path in (ROOT / room).rglob("*.py")]


def taken(path: Path) -> Iterator[tuple[str, str]]:
    """Every name that a script imports from the package, with its module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "anysize":
            yield from ((str(node.module), alias.name) for alias in node.names)


def has(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_imports_only_what_the_package_has(path: Path) -> None:
    assert [f"{module}.{name}" for module, name in taken(path) if not has(module, name)] == []
