"""Data files: where to find them, how to read them without trusting them, how to download them.

Every reader turns a damaged, foreign or truncated file into one `DataError` that names it, and none
unpickles.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import re
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from anysize import interrupts
from anysize.atomic import replaced
from anysize.data.parts import Array
from anysize.errors import DataError, short

Arrays = dict[str, Array]

DEBIAN_FOLDER = Path("/usr/share/datasets")
"""Where Debian's data packages put their files."""

TIMEOUT_SECONDS = 30


def cache_folder() -> Path:
    """Where downloads are kept: `anysize` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anysize"


def search_folders() -> list[Path]:
    """The folders where a data file may be, in the order in which they are searched."""
    own = os.environ.get("ANYSIZE_DATA")
    return ([Path(own)] if own else []) + [cache_folder()]


def locate(file: str) -> Path | None:
    """The first file of that name in the search folders, or None."""
    paths = (folder / file for folder in search_folders())
    return next((path for path in paths if path.is_file()), None)


def locate_folder(name: str) -> Path | None:
    """The first folder of that name in the search folders, or None."""
    paths = (folder / name for folder in search_folders())
    return next((path for path in paths if path.is_dir()), None)


def stored_sets() -> dict[str, Path]:
    """Every data set stored as NAME.npz in the search folders, by name."""
    found: dict[str, Path] = {}
    for folder in search_folders():
        for path in sorted(folder.glob("*.npz")):
            found.setdefault(path.stem, path)
    return found


def is_set_name(name: str) -> bool:
    """Whether a name can be the name of a file in a search folder, and cannot lead outside it."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is not None


def missing(name: str, file: str, ways: Sequence[str], also_in: Sequence[Path] = ()) -> DataError:
    """The error for a data set that was not found: where it was looked for, and every way to get it."""
    looked = [*also_in, *(folder / file for folder in search_folders())]
    own = "" if os.environ.get("ANYSIZE_DATA") else " (ANYSIZE_DATA is not set)"
    how = [*ways, f"put {file} into a folder and set ANYSIZE_DATA to it, or into {cache_folder()}"]
    return DataError(
        f"the data set '{name}' is not on this machine.\n"
        f"Looked for: {', '.join(map(str, looked))}{own}.\n"
        f"To get it: {'; or '.join(how)}."
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error while a file is read into one error that names the file."""
    try:
        yield
    except DataError:
        raise
    # Damage can surface as any exception of the readers used: zip, gzip, numpy's header parser, json.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read: it is damaged, truncated or in another format ({reason})") from error


def read_npz(path: Path) -> Arrays:
    """Every array of an .npz file; nothing is unpacked before its length is known to be that of its shape."""
    with reading(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(archive, members)
            _check_count(path, len(archive.comment), len(members))
        opened = np.load(path, allow_pickle=False)
        with opened:
            arrays = {name: opened[name] for name in opened.files}
        for name, array in arrays.items():
            _check_text(name, array)
        return arrays


def _check_count(path: Path, comment: int, listed: int) -> None:
    """Refuse an archive whose last record counts other members than its list has: readers believe a shorter list."""
    with path.open("rb") as file:
        file.seek(-_END_BYTES - comment, os.SEEK_END)
        end = file.read(_END_BYTES)
    counted = int.from_bytes(end[10:12], "little")
    if counted != min(listed, 0xFFFF):
        raise ValueError(f"it counts {counted} arrays and lists {listed}")


def _check_text(name: str, array: Array) -> None:
    """Refuse texts with numbers that are no characters: nobody could print them."""
    if array.dtype.kind != "U":
        return
    points = np.frombuffer(array.tobytes(), np.dtype("u4").newbyteorder(array.dtype.byteorder))
    if bool(((points > sys.maxunicode) | ((points >= 0xD800) & (points < 0xE000))).any()):
        raise ValueError(f"{name} has characters that do not exist")


def _check_members(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo]) -> None:
    names = [member.filename.removesuffix(".npy") for member in members]
    if len(set(names)) < len(names):
        raise ValueError("two of its arrays have one name")
    for member in members:
        if not member.filename.endswith(".npy"):
            raise ValueError(f"{short(member.filename)} is not an array")
        if member.file_size > _LARGE and member.file_size > _MOST_PACKED * member.compress_size:
            raise ValueError(f"{member.filename} would be {member.file_size} bytes, out of {member.compress_size}")
        with archive.open(member) as file:
            read_header = _NPY_HEADERS[np.lib.format.read_magic(file)]
            shape, _, kind = read_header(file)
            if member.file_size - file.tell() != prod(shape) * kind.itemsize or min(shape, default=0) < 0:
                raise ValueError(f"{member.filename} does not have as many bytes as its shape {shape} needs")


_END_BYTES = 22  # of a zip file's last record, without its comment
_LARGE, _MOST_PACKED = 50_000_000, 300  # bytes; how many times a large array may be larger than it is packed
_NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_idx(path: Path) -> Array:
    """The array in a gzipped IDX file of unsigned bytes, the format of MNIST."""
    with reading(path), gzip.open(path) as file:
        content = file.read()
        if len(content) < 4 or content[:3] != b"\x00\x00\x08":
            raise ValueError("not an IDX file of unsigned bytes")
        axes = content[3]
        start = 4 + 4 * axes
        shape = tuple(np.frombuffer(content[4:start], dtype=">u4").tolist())
        if len(shape) != axes or len(content) != start + prod(shape):
            raise ValueError(f"{len(content)} bytes do not hold the shape {shape}")
        return np.frombuffer(bytearray(content), dtype=np.uint8, offset=start).reshape(shape)


def read_json_lines(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The objects of a .jsonl.gz or .jsonl.xz file, each with at least these keys."""
    with reading(path), lzma.LZMAFile(path) if path.suffix == ".xz" else gzip.GzipFile(path) as file:
        rows = [json.loads(line) for line in file]
        for number, row in enumerate(rows, start=1):
            absent = set(keys) - set(row)
            if absent:
                raise ValueError(f"line {number} lacks {', '.join(sorted(absent))}")
        if not rows:
            raise ValueError("it is empty")
        return rows


def read_cifar(path: Path, prefix: str) -> Arrays:
    """The arrays of a binary CIFAR archive; the last label byte of a record is the class."""
    with reading(path), tarfile.open(path) as archive:
        files = {m.name.rsplit("/")[-1]: m for m in archive.getmembers() if m.isfile()}
        train = sorted(name for name in files if re.fullmatch(r"(data_batch_\d|train)\.bin", name))
        class_names = _member(archive, _one_of(files, "batches.meta.txt", "fine_label_names.txt")).decode().split()
        x_train, y_train = _cifar_records(b"".join(_member(archive, files[n]) for n in train), prefix)
        test = _member(archive, _one_of(files, "test_batch.bin", "test.bin"))
        x_test, y_test = _cifar_records(test, prefix)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    return arrays | {"class_names": np.array(class_names)}


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to an .npz file, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as new, new.open("wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]


def download(url: str, path: Path, sha256: str) -> None:
    """Download `url` to `path` with a progress bar, and refuse content with another checksum.

    The checksum is of the content: for a .gz file, of what is inside, since the same content circulates
    with several gzip headers. Archives (.tar.gz) are checked as they are.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response, open(path, "wb") as file:
            _copy_with_progress(response, file, path.name)
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise DataError(f"{url} could not be fetched ({error})") from error
    found = _content_sha256(path)
    if found != sha256:
        raise DataError(f"{url} gave unexpected content: its sha256 is {found}, not {sha256}; nothing was kept")


def _copy_with_progress(response: Any, file: IO[bytes], name: str) -> None:
    size = response.headers.get("Content-Length")
    total = int(size) if size else None
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total)
        copied = 0
        while block := response.read(1 << 16):
            interrupts.check()
            file.write(block)
            copied += len(block)
            progress.update(task, completed=copied)
    if total is not None and copied != total:
        raise ValueError(f"only {copied} of {total} bytes arrived")


def _content_sha256(path: Path) -> str:
    packed = path.suffix == ".gz" and not path.name.endswith(".tar.gz")
    digest = hashlib.sha256()
    with reading(path), gzip.GzipFile(path) if packed else path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _one_of(members: Mapping[str, tarfile.TarInfo], *names: str) -> tarfile.TarInfo:
    present = [members[name] for name in names if name in members]
    if not present:
        raise ValueError(f"it holds none of {', '.join(names)}")
    return present[0]


def _member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name} is not a file")
    return file.read()


def _cifar_records(content: bytes, prefix: str) -> tuple[Array, Array]:
    labels = 2 if prefix == "cifar100" else 1  # in CIFAR-100 each image has a coarse and a fine label
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, labels + 3072)
    images = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # as in every .npz: (N, H, W, 3)
    return np.ascontiguousarray(images), records[:, labels - 1].copy()
