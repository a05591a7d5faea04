"""Secure sums over a real fleet on loopback: TLS, keys, SuperNodes, and a device that loses its power in a round."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import anysize as az
from anysize.wire import flatten

pytest.importorskip("flwr", reason="Flower is an extra")
loopback = importlib.import_module("loopback")
fleets = importlib.import_module("test_fleet_slow")

pytestmark = pytest.mark.slow

NAMES = {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5}

EXPERIMENT = """
name = "secure"
rounds = 60
evaluate_every = 60
[data]
name = "devices"
test = "digits"
[model]
name = "mlp"
options = { hidden = [16] }
[devices]
capacities = [0.5]
[method]
name = "heterofl"
[tricks]
classwise_head = false
[training]
learning_rate = 0.05
[aggregation]
secure_threshold = 3
[engine]
name = "flower"
min_clients = 3
round_timeout = 30.0
"""


def test_a_device_killed_in_a_round_leaves_a_sum_of_the_others(tmp_path: Path) -> None:
    home = tmp_path / "fleet"
    with loopback.Loopback(home, EXPERIMENT, NAMES) as fleet:
        fleet.serve()
        fleet.join()
        fleet.run()
        fleet.wait(lambda: any(len(r["clients"]) == 4 for r in fleet.rounds("secure")), 240, "run")
        fleets.kill_tree(fleet.pid("d"))
        fleet.wait(lambda: any(took_part(r) == {0, 1, 2} for r in fleet.rounds("secure")), 240, "run")
        fleet.kill("run", 15)
        rounds = fleet.rounds("secure")
    complete = next(r for r in rounds if took_part(r) == {0, 1, 2, 3})
    assert "missing" not in complete
    short = next(r for r in rounds if took_part(r) == {0, 1, 2})
    assert not short.get("void")
    assert {entry["client"] for entry in short.get("missing", [])} <= {3}
    assert all(c["loss"] is None and c["samples"] is None for r in rounds for c in r["clients"])
    assert all(r["train_loss"] > 0 for r in (complete, short))
    state, _ = flatten(az.load(home / "runs" / "secure").state)
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    assert loopback.left_behind(home) == []


def took_part(event: Any) -> set[int]:
    return {client["client"] for client in event["clients"]}
