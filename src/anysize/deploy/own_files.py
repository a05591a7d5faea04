"""The user's own modules: which files beside an experiment hold them, with everything that these import from there."""

from __future__ import annotations

import ast
import shutil
import symtable
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

Parsed = TypeVar("Parsed")


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


def undefined(name: str, folders: Sequence[Path]) -> Path | None:
    """The file beside the experiment that should hold the code named "module:attribute", and does not define it.

    None also where that cannot be seen without running the file: it is not here, or takes names from elsewhere.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "frames.py").write_text("def load(device): ...")
    >>> undefined("frames:load", [folder]), undefined("frames:laod", [folder]).name
    (None, 'frames.py')
    """
    module, _, attribute = name.partition(":")
    path = None if "." in module else _module(module, folders)
    if path is None:
        return None
    file = path if path.is_file() else path / "__init__.py"
    names = _names(file)
    return file if names is not None and attribute.partition(".")[0] not in names else None


def _names(file: Path) -> set[str] | None:
    """The names that a module defines; None if it may have others, or cannot be read."""
    tree = _parsed(file, ast.parse)
    table = _parsed(file, lambda text: symtable.symtable(text, str(file), "exec"))
    if tree is None or table is None or any(isinstance(n, ast.alias) and n.name == "*" for n in ast.walk(tree)):
        return None
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    return None if "__getattr__" in names else names


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
        tree = _parsed(file, ast.parse)
        for node in [] if tree is None else ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (_top(name.name) for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield _top(node.module)


def _parsed(file: Path, parse: Callable[[str], Parsed]) -> Parsed | None:
    """A file's text, parsed; None if it is no Python: importing it will say what is wrong."""
    try:
        with tokenize.open(file) as source:  # in the encoding that the file declares
            return parse(source.read())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _sources(package: Path) -> list[Path]:
    """The Python files of a package; an editor's lock may have such a name and be none."""
    return sorted(path for path in package.rglob("*.py") if path.is_file())


def _top(module: str) -> str:
    return module.partition(".")[0]
