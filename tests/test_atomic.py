"""Files that change in one step: a full disk, an interrupt, or a block that raises leaves the old file alone."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anysize.atomic import replaced, unfinished, write
from anysize.deploy.roster import Roster
from anysize.errors import CheckpointError, ConfigError
from anysize.records import checkpoint


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_written_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write(path, b"old")
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize("broken", [(os, "fsync"), (Path, "write_bytes"), (Path, "replace")])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    broken: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    write(path, b"old")
    monkeypatch.setattr(*broken, full)
    with pytest.raises(ConfigError, match=r"state: No space left on device.*untouched; name another file$"):
        write(path, b"new", ConfigError, "name another file")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


def test_only_the_files_of_a_run_are_written_again_with_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"untouched; .*resume=True"):
        checkpoint.write(tmp_path / "state", b"new")
    with pytest.raises(CheckpointError, match=r"fleet\.json.*untouched; solve that and try again$"):
        Roster.at(tmp_path, ["camera"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "state"
    write(path, b"old")

    def interrupted() -> None:
        with replaced(path, ".onnx") as new:
            assert new.suffix == ".onnx"
            new.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"could not write .*: No such file"):
        checkpoint.write(tmp_path / "no" / "state", b"new")


def test_a_file_has_the_rights_that_the_user_gives_new_files(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write(tmp_path / "state", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600


def test_what_a_killed_process_left_is_found_by_the_name_of_its_file(tmp_path: Path) -> None:
    left = tmp_path / ".config.toml.x1y2.part"
    for path in (left, tmp_path / ".notes.part", tmp_path / "config.toml"):
        path.write_text("half")
    assert unfinished(tmp_path) == unfinished(tmp_path, "config.toml") == [left]
    assert unfinished(tmp_path, "environment.json") == []


_LIMITED = """
import resource, signal, sys
from pathlib import Path
from anysize.errors import AnysizeError
from anysize.atomic import write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write(Path(sys.argv[1]), bytes(10_000))
except AnysizeError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_a_file_that_really_does_not_fit_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write(path, b"old")
    ran = subprocess.run([sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True, check=True)
    assert "could not write" in ran.stdout
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state"]
