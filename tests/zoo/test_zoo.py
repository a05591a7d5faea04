"""Every network of the zoo narrows, shrinks, runs and trains; those that do not are listed in `findings.json`, and
are refused with an error whose way out works.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anysize as az
from anysize.errors import ModelError
from zoo.catalogue import ENTRIES, ORDERED, REFUSED
from zoo.check import answered, built, check, equal, movable_groups, reorder, way_out

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


def test_every_network_that_fails_is_listed_with_its_reason_and_a_way_out() -> None:
    failed = {name: row for name, row in FINDINGS.items() if row["error"]}
    assert set(failed) == set(REFUSED)
    assert all(row["keep"] for row in failed.values())
    assert len(REFUSED) < 0.05 * len(FINDINGS)


def test_all_rows_are_of_one_code_and_there_are_three_hundred_at_least() -> None:
    assert len({row["code"] for row in FINDINGS.values()}) == 1
    assert len(FINDINGS) >= 300


def test_every_network_that_answers_otherwise_in_another_order_is_listed_with_its_reason() -> None:
    assert {name for name, row in FINDINGS.items() if row["reordered"] < row["moved"]} == set(ORDERED)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_network_narrows_once_the_errors_are_taken_at_their_word(name: str) -> None:
    entry = ENTRIES[name]
    if entry.missing():
        pytest.skip(f"not installed: {', '.join(entry.missing())}")
    with pytest.raises(ModelError, match="keep="):
        check(entry, oracle=False)
    way_out(entry)


class Silent(nn.Module):
    """Positions of the same shape that say nothing."""

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(self.positions(*args, **kwargs))


@pytest.mark.slow
def test_without_its_waves_pegasus_x_takes_channels_in_any_order() -> None:
    pytest.importorskip("transformers")
    network, inputs = built(ENTRIES["transformers/pegasus_x"])
    for half in (network.network.model.encoder, network.network.model.decoder):
        half.embed_positions = Silent(half.embed_positions)
    axes = az.trace(network, inputs)
    assert movable_groups(network, inputs, axes) == (len(axes.groups), len(axes.groups))


@pytest.mark.slow
def test_with_its_rotations_in_the_same_order_reformer_takes_channels_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    network, inputs = built(ENTRIES["transformers/reformer"])
    axes = az.trace(network, inputs)
    (hashed,) = (group.name for group in axes.groups if group.name.endswith("query_key"))
    full, other = answered(network, inputs), reorder(network, axes, [hashed])
    assert not equal(answered(other, inputs), full)
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *args, **options: draw(*args, **options).flip(1))
    assert equal(answered(other, inputs), full)
