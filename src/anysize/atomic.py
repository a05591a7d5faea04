"""Files that change in one step: after a crash, and for any reader, a file is the old one or the new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anysize.errors import AnysizeError

_MARK = ".part"


@contextmanager
def replaced(path: Path, ending: str = "") -> Iterator[Path]:
    """Yield a path to write to; the file there takes the place of `path` when the block ends.

    If the block raises, `path` stays as it was and the new file is deleted.

    Args:
        path: the file to replace.
        ending: what the yielded name ends in, for writers that look at it, such as ".onnx".

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replaced(Path(folder) / "note") as new:
    ...         _ = new.write_text("all of it")
    ...     [file.name for file in Path(folder).iterdir()]
    ['note']
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(6)}{_MARK}{ending}")
    try:
        yield new
        with new.open("rb+") as file:
            os.fsync(file.fileno())  # otherwise a crash of the machine may leave the new name with no content
        new.replace(path)
    finally:
        with suppress(OSError):
            new.unlink()


def write(
    path: Path, content: bytes, error: type[AnysizeError] = AnysizeError, hint: str = "solve that and try again"
) -> None:
    """Replace `path` by `content`.

    Args:
        path: the file.
        content: its new content.
        error: what to raise if the file cannot be written.
        hint: what to do then, as the end of the error's sentence.
    """
    try:
        with replaced(path) as new:
            new.write_bytes(content)
    except OSError as problem:
        raise error(
            f"could not write {path}: {problem.strerror or problem}. The old file, if any, is untouched; {hint}"
        ) from None


def unfinished(folder: Path, name: str = "*") -> list[Path]:
    """Files that a killed process left while it replaced files of that name in a folder."""
    return list(folder.glob(f".{name}.*{_MARK}"))
