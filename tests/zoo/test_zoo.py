"""Every network of the zoo narrows, shrinks, runs and trains; those that do not are listed in `findings.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo.catalogue import ENTRIES
from zoo.check import check

FINDINGS = json.loads((Path(__file__).parent / "findings.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_a_public_network_narrows_to_half_and_a_quarter_and_trains(name: str) -> None:
    entry, known = ENTRIES[name], FINDINGS.get(name)
    if entry.missing():
        pytest.skip(f"not installed: {', '.join(entry.missing())}")
    if known is None:
        pytest.skip("never measured; run `python -m zoo.table` in tests/")
    if known["error"]:
        pytest.xfail(known["error"])
    check(entry)
