"""Which device is which client of a run, for as long as the run lasts: kept in a file of the run directory."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from anysize.atomic import write
from anysize.errors import CheckpointError

FILE = "fleet.json"


@dataclass
class Roster:
    """Client ids by the names of their devices: a device that comes back is the client that it was.

    Attributes:
        path: of the file.
        run: what tells this run from every other, so that a device finds what it kept for it.
        clients: the id of each name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     roster = Roster.at(Path(folder), ["cam", "board"])
    ...     roster.enter(["van"])
    ...     Roster.at(Path(folder), []).clients
    {'board': 0, 'cam': 1, 'van': 2}
    """

    path: Path
    run: str
    clients: dict[str, int] = field(default_factory=dict)

    @classmethod
    def at(cls, directory: Path, names: Iterable[str], fresh: bool = False) -> Roster:
        """The roster of the run in a directory; a new one, or a `fresh` one, begins with these names, sorted."""
        path = directory / FILE
        if path.is_file() and not fresh:
            return cls._read(path)
        roster = cls(path, uuid.uuid4().hex)
        roster.enter(names, always=True)
        return roster

    def enter(self, names: Iterable[str], always: bool = False) -> None:
        """Gives ids to names that have none, in alphabetical order, and saves that."""
        new = sorted(set(names) - set(self.clients))
        first = max(self.clients.values(), default=-1) + 1
        self.clients |= {name: first + place for place, name in enumerate(new)}
        if new or always:
            text = json.dumps({"run": self.run, "clients": self.clients}, indent=1) + "\n"
            write(self.path, text.encode(), CheckpointError)

    @classmethod
    def _read(cls, path: Path) -> Roster:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, str(found["run"]), {str(name): int(client) for name, client in found["clients"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); bring back a whole copy of it, or begin again with --overwrite"
            ) from None
