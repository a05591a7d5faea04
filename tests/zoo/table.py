"""Check networks of the zoo and write what was found: `python -m zoo.table [pattern ...]` from `tests/`.

A row has the version of the code that it was found with; a network whose row has the present one is left out, so a
table that was cut off goes on where it was.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

from anysize.errors import ModelError
from zoo.catalogue import ENTRIES
from zoo.check import Finding, check, way_out
from zoo.entries import Entry

HERE = Path(__file__).parent
OUT = HERE / "findings.json"
CODE = "src/anysize/elastic"


def main(patterns: list[str]) -> None:
    warnings.simplefilter("ignore")
    version = code_version()
    for name, entry in ENTRIES.items():
        known = json.loads(OUT.read_text()) if OUT.exists() else {}
        asked = not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        if not asked or entry.missing() or known.get(name, {}).get("code") == version:
            continue
        found = examined(entry)
        print(
            name,
            found.error[:400] or f"{found.parameters} exact {found.exact}/{found.tried} {found.trace_s}s",
            flush=True,
        )
        row = {key: value for key, value in found.as_row().items() if key != "name"}
        OUT.write_text(json.dumps({**known, name: {**row, "code": version}}, indent=1, sort_keys=True) + "\n")


def examined(entry: Entry) -> Finding:
    """What was found of one network, or why it failed and whether the way out works."""
    try:
        return check(entry)
    except Exception as error:
        kind = "" if isinstance(error, ModelError) else f"{type(error).__name__} at {place(error)}: "
        found = Finding(entry.name, error=kind + re.sub(r"/[^ ]*/site-packages/", "", str(error)))
    with contextlib.suppress(Exception):
        found.keep, found.parameters = way_out(entry)
    return found


def code_version() -> str:
    """What git calls the code that traces and narrows, as it was committed; refuses changes that are not."""
    git = ["git", "-C", str(HERE)]
    if subprocess.run([*git, "diff", "--quiet", "HEAD", "--", f":/{CODE}"]).returncode:
        raise SystemExit(f"{CODE} has changes that are not committed, so that rows could not name their code")
    return subprocess.run([*git, "rev-parse", "--short", f"HEAD:{CODE}"], capture_output=True, text=True).stdout.strip()


def place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


if __name__ == "__main__":
    main(sys.argv[1:])
