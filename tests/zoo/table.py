"""Check networks of the zoo and write what was found: `python -m zoo.table [pattern ...]` from `tests/`."""

from __future__ import annotations

import fnmatch
import json
import sys
import traceback
import warnings
from pathlib import Path

from anysize.errors import ModelError
from zoo.catalogue import ENTRIES
from zoo.check import Finding, check

OUT = Path(__file__).parent / "findings.json"


def main(patterns: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name, entry in ENTRIES.items():
        if patterns and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if entry.missing():
            continue
        try:
            found = check(entry)
        except KeyboardInterrupt:
            raise
        except Exception as error:
            kind = "" if isinstance(error, ModelError) else f"{type(error).__name__} at {place(error)}: "
            found = Finding(name, error=kind + str(error))
        print(
            name,
            found.error[:400] or f"{found.parameters} exact {found.exact}/{found.tried} {found.trace_s}s",
            flush=True,
        )
        known = json.loads(OUT.read_text()) if OUT.exists() else {}
        known[name] = {key: value for key, value in found.as_row().items() if key != "name"}
        OUT.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


if __name__ == "__main__":
    main(sys.argv[1:])
