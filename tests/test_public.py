"""The public names, pinned: adding or removing one is a decision, not an accident."""

from __future__ import annotations

import subprocess
import sys
import types

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


def test_run_stays_the_function_once_the_module_of_that_name_is_imported() -> None:
    import anysize.run

    assert not isinstance(anysize.run, types.ModuleType)
    assert callable(anysize.run)


def test_help_is_printed_without_loading_pytorch() -> None:
    code = """
import sys
import anysize.cli
sys.argv = ["anysize", "--help"]
try:
    anysize.cli.main()
finally:
    assert not {"torch", "numpy", "sklearn", "pydantic"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("run", "compare", "inspect", "plan", "customize", "evaluate", "report", "status", "demo"):
        assert command in done.stdout
