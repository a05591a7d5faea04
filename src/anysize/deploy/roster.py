"""Which device is which client of a run, in a file of the run directory."""

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
    """Client ids by the names of their devices: a device that rejoins stays the same client.

    Attributes:
        path: the file.
        run: the unique id of the run, by which a device finds the tensors that it kept for it.
        clients: the client id of each name.

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
        """The roster of the run in a directory; a new one, or a `fresh` one, starts with these names, sorted."""
        path = directory / FILE
        if path.is_file() and not fresh:
            return cls._read(path)
        roster = cls(path, uuid.uuid4().hex)
        roster.enter(names, always=True)
        return roster

    def enter(self, names: Iterable[str], always: bool = False) -> None:
        """Give ids to new names, in alphabetical order, and save the file."""
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
                f"{path} is damaged ({error}); restore an intact copy of it, or start again with --overwrite"
            ) from None
