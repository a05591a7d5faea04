"""A process that brings a comparison's cells to their end: `python -m anysize.comparisons.worker`.

Its standard input has one line, a JSON object that says what to do, and ends when whoever started it ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from anysize import interrupts
from anysize.engines.start import quick_start


def main() -> None:
    """Works until all cells are finished; ends between two steps when it is told to."""
    interrupts.command()
    quick_start()
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    from anysize.comparisons.cells import cells
    from anysize.comparisons.working import Workshop, work
    from anysize.config.files import from_dict

    home = request["home"]
    config = from_dict(request["tables"], folder=None if home is None else Path(home))
    wanted = set(request["paths"])
    try:
        work(
            [cell for cell in cells(config) if cell.path in wanted],
            Workshop(Path(request["folder"]), engine="inprocess"),
        )
    except KeyboardInterrupt:
        sys.exit(interrupts.exit_code())


def _end_with_parent() -> None:
    """Stops this process as a signal would when the other end of its standard input is closed."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
