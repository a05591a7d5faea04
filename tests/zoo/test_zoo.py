"""Every network of the zoo narrows, shrinks, runs and trains; those that do not are listed in `findings.json`, and
are refused with an error whose way out works.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anysize.errors import ModelError
from zoo.catalogue import ENTRIES, WAYS_OUT
from zoo.check import check, way_out

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


def test_every_network_that_fails_has_a_way_out() -> None:
    assert {name for name, row in FINDINGS.items() if row["error"]} == set(WAYS_OUT)
    assert len(WAYS_OUT) < 0.05 * len(FINDINGS)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS_OUT)
def test_a_refused_network_narrows_once_what_the_error_advises_is_kept(name: str) -> None:
    entry = ENTRIES[name]
    if entry.missing():
        pytest.skip(f"not installed: {', '.join(entry.missing())}")
    with pytest.raises(ModelError, match="keep="):
        check(entry, oracle=False)
    way_out(entry, WAYS_OUT[name])
