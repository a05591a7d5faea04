"""What a device has told in secure sums, in a file beside the device's own: it tells nothing twice.

Of two sums over what was learned from one message, one with a device and one without it, the difference is what that
device learned. So it remembers, also when it was started again: a server may be able to end its process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anysize.atomic import write
from anysize.errors import ConfigError, TrustError
from anysize.wire import parsed

SUMMED = "summed.json"


class Summed:
    """The sums that a device was part of.

    Args:
        path: the file; it need not exist.

    Raises:
        ConfigError: the file cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Summed(Path(folder) / SUMMED).note("ab12", 3, b"message")
    ...     Summed(Path(folder) / SUMMED).check("ab12", 3, b"another")
    Traceback (most recent call last):
    anysize.errors.TrustError: refused round 3: what it learned in round 3 was summed already
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last, self._messages = _read(path)

    def check(self, run: str, round: int, message: bytes) -> None:
        """Refuse a round that it was summed in already, and a message from which it learned what was summed.

        Args:
            run: the run's id, which the server chooses.
            round: of the message.
            message: the digest of all that it is to learn from, whatever the run is called.
        """
        told = self._last.get(run, 0)
        if round <= told:
            raise TrustError(f"refused round {round}: what it learned in round {told} was summed already")
        if message.hex() in self._messages:
            raise TrustError(
                f"refused round {round}: what it learned from the same message was summed in another run; give a run "
                "that repeats one another seed"
            )

    def note(self, run: str, round: int, message: bytes) -> None:
        """Remember a sum, before anything is told in it."""
        last, messages = self._last | {run: round}, [*self._messages, message.hex()]
        write(self._path, json.dumps({"rounds": last, "messages": messages}).encode(), TrustError)
        self._last, self._messages = last, messages


def _read(path: Path) -> tuple[dict[str, int], list[str]]:
    if not path.exists():
        return {}, []
    try:
        found: Any = parsed(path.read_bytes())
        rounds, messages = found["rounds"], found["messages"]
        if all(type(last) is int for last in rounds.values()) and all(isinstance(one, str) for one in messages):
            return dict(rounds), list(messages)
        why = "it holds something else"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"{path} does not say what this device told in secure sums ({why}); restore it, or delete it if it was in none"
    )
