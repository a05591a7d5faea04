"""The user's own modules: which files beside an experiment hold them, with everything that these import from there."""

from __future__ import annotations

import ast
import shutil
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def own_files(names: Iterable[str], folders: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The modules and packages in these folders that hold the code named "module:attribute", and modules not found.

    A module that one of them imports, and that lies beside it, comes too.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "mine.py").write_text("import torch, layers")
    >>> _ = (folder / "layers.py").write_text("")
    >>> found, absent = own_files(["mine:network", "shop.frames:load"], [folder])
    >>> [path.name for path in found], absent
    (['mine.py', 'layers.py'], ['shop'])
    """
    waiting = [(_top(name.partition(":")[0]), tuple(folders)) for name in names]
    found: dict[str, Path] = {}
    absent: dict[str, None] = {}
    asked = {name for name, _ in waiting}
    while waiting:
        name, places = waiting.pop(0)
        path = _module(name, places)
        if path is None and name in asked:
            absent[name] = None
        if path is None or name in found:
            continue
        found[name] = path
        waiting += [(other, (path.parent,)) for other in _imports(path)]
    return list(found.values()), list(absent)


def copy_into(folder: Path, files: Iterable[Path]) -> None:
    """Copy modules, and the Python files of packages, into a folder."""
    for path in files:
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
            continue
        for part in _sources(path):
            target = folder / path.name / part.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(part, target)


def _module(name: str, folders: Iterable[Path]) -> Path | None:
    """The file NAME.py, or the folder NAME with Python files."""
    for folder in folders:
        if (folder / f"{name}.py").is_file():
            return folder / f"{name}.py"
        if (folder / name / "__init__.py").is_file():
            return folder / name
    return None


def _imports(path: Path) -> Iterator[str]:
    """The first parts of all modules that a file, or a package, imports."""
    for file in [path] if path.is_file() else _sources(path):
        try:
            with tokenize.open(file) as source:  # in the encoding that the file declares
                tree = ast.parse(source.read())
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # importing it will say what is wrong
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (_top(name.name) for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield _top(node.module)


def _sources(package: Path) -> list[Path]:
    """The Python files of a package; an editor's lock may have such a name and be none."""
    return sorted(path for path in package.rglob("*.py") if path.is_file())


def _top(module: str) -> str:
    return module.partition(".")[0]
