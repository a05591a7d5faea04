"""The public names, pinned: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import anysize


def test_the_public_names_are_these_and_all_of_them_exist() -> None:
    assert anysize.__all__ == [
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
        "callbacks",
        "compare",
        "export",
        "load",
        "load_config",
        "methods",
        "narrow",
        "run",
        "trace",
    ]
    for name in anysize.__all__:
        assert getattr(anysize, name).__doc__
    assert dir(anysize) == anysize.__all__
    assert not hasattr(anysize, "nothing_of_this_name")


def test_help_is_printed_without_loading_pytorch() -> None:
    code = """
import sys
from pathlib import Path
import anysize.cli
sys.argv = ["anysize", "--help"]
try:
    anysize.cli.commands.main()
finally:
    assert not {"torch", "numpy", "sklearn", "pydantic"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for command in ("run", "compare", "inspect", "plan", "customize", "evaluate", "report", "status", "demo"):
        assert command in done.stdout


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and imports for types alone count too."""
    graph = grimp.build_graph("anysize", cache_dir=None)
    above = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    tuple(graphlib.TopologicalSorter(above).static_order())  # raises a CycleError that names the modules


def test_type_checkers_see_the_public_names() -> None:
    """A stub exports only what it imports as the same name."""
    stub = ast.parse(Path(anysize.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    names = [name for node in stub.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert all(name.asname == name.name for name in names)
    assert sorted(name.name for name in names) == anysize.__all__


@pytest.mark.parametrize("command", ["run", "plan", "inspect", "compare"])
def test_an_unknown_key_is_found_without_loading_pytorch(command: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('[data]\nname = "digits"\nclinets = 3\n[model]\nname = "mlp"\n[method]\nname = "flanc"\n')
    code = f"""
import sys
from anysize.__main__ import main
sys.argv = ["anysize", "{command}", {str(file)!r}]
try:
    main()
finally:
    assert not {{"torch", "numpy", "sklearn"}} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done.stderr
    assert "did you mean 'clients'?" in done.stderr
