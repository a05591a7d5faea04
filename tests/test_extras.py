"""What must be installed: everything that is imported is declared, and a hint for what is missing can be typed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import small
from anysize.cli import commands
from anysize.config import extras

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def imported(source: Path) -> set[str]:
    """The packages that a file imports anywhere, the standard library's and our own left out."""
    nodes = list(ast.walk(ast.parse(source.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"anysize"}


def declared(requirements: list[str]) -> set[str]:
    """The names of what is required, spelt as in metadata."""
    return {normal(re.split(r"[\[<>=! ]", requirement, maxsplit=1)[0]) for requirement in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_everything_that_is_imported_is_declared() -> None:
    optional = [requirement for group in PROJECT["optional-dependencies"].values() for requirement in group]
    known = declared([*PROJECT["dependencies"], *optional])
    owners = {"mlflow": ["mlflow-skinny"], **packages_distributions()}  # not installed here
    strange = {
        (package, str(source.relative_to(ROOT)))
        for source in SOURCES
        for package in imported(source)
        if not {normal(owner) for owner in owners.get(package, [package])} & known
    }
    assert not strange


def test_no_text_but_the_hint_itself_names_an_index() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").iterdir(), *(ROOT / "src").rglob("*.md")]
    texts = [path for path in [*SOURCES, *pages] if path != Path(extras.__file__) and path.is_file()]
    assert [path for path in texts if "anysize[" in path.read_text(encoding="utf-8")] == []


class Installed:
    """As much of a distribution as is asked for."""

    def __init__(self, url: str | None) -> None:
        self._text = None if url is None else json.dumps({"url": url})

    def read_text(self, name: str) -> str | None:
        return self._text if name == "direct_url.json" else None


def hint(monkeypatch: pytest.MonkeyPatch, url: str | None) -> str:
    """The hint of an installation from an address, or from an index."""
    monkeypatch.setattr(extras, "_TREE", Path("/nowhere"))
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(url))
    return extras.install_command("fleet")


def test_in_a_checkout_the_hint_names_its_folder() -> None:
    assert extras.install_command("fleet") == f"pip install -e '{ROOT}[fleet]'"


def test_the_hint_names_the_folder_or_the_wheel_that_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "it's a wheel.whl"
    wheel.touch()
    assert hint(monkeypatch, tmp_path.as_uri()) == f"pip install '{tmp_path}[fleet]'"
    assert hint(monkeypatch, wheel.as_uri()) == f"""pip install '{tmp_path}/it'"'"'s a wheel.whl[fleet]'"""


def test_the_hint_names_an_index_only_where_anysize_came_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hint(monkeypatch, None) == "pip install 'anysize[fleet]'"
    for gone in ("file:///gone/anysize.whl", "https://example.org/anysize"):
        assert hint(monkeypatch, gone) == "pip install '.[fleet]' in a checkout of anysize"


def test_the_demo_without_onnx_ends_with_a_line_on_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = {"compare": {"methods": ["flanc"]}, "engine": {"name": "inprocess"}}
    small.file(tmp_path, rounds=1, **alone).rename(tmp_path / "demo.toml")
    monkeypatch.setattr(commands, "files", lambda package: tmp_path)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    code, out, err = small.call(monkeypatch, capsys, "demo", "--out", tmp_path / "run")
    assert (code, "error" in err) == (0, False)
    last = f"no ONNX files: ONNX needs onnxscript, not installed: pip install -e '{ROOT}[export]'"
    assert out.splitlines()[-1] == last
    assert (tmp_path / "run" / "compare.html").is_file()
    assert (tmp_path / "run" / "flanc" / "seed-0" / "report.html").is_file()


FLEET_COMMANDS = """
import sys
from anysize.cli.commands import main
sys.modules["flwr"] = None
for command in ("server fleet", "join a.toml", "deploy init fleet", "run a.toml --superlink fleet"):
    sys.argv = ["anysize", *command.split()]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == 2, command
"""


def test_every_command_of_a_fleet_without_flower_says_how_to_get_it(tmp_path: Path) -> None:
    small.file(tmp_path).rename(tmp_path / "a.toml")
    command = [sys.executable, "-c", FLEET_COMMANDS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    hint = f"error: a fleet needs flwr, not installed: pip install -e '{ROOT}[fleet]'"
    assert done.stderr.splitlines() == [hint] * 4
