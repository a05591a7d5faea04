"""Networks of every kind trained for real: a round, a test and finished networks, by one method of each family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import anysize as az
from anysize.errors import MethodError
from anysize.wire import flatten
from topologies import TOPOLOGIES

SLOW = ("flanc", "splitmix", "prism", "fjord")
METHODS = ["heterofl", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
WITH_BLOCKS = {
    "causal_encoder", "group_norm", "group_norm_many_groups", "grouped_many", "mixer", "transformer_encoder",
}  # fmt: skip


def trained(name: str, method: str, out: Path) -> az.Run:
    """One round of two clients of different size that learn to answer zero."""
    network, (x,) = TOPOLOGIES[name]()
    x = torch.cat([x] * 4)
    with torch.no_grad():
        y = torch.zeros_like(network.eval()(x))
    experiment = az.Experiment(
        data=az.Data(train=(x.numpy(), y.numpy()), test=(x[:4].numpy(), y[:4].numpy())),
        clients=2,
        model=network,
        method=method,
        task="regression",
        devices={"capacities": [0.5, 1.0]},
        training={"batch_size": 4, "learning_rate": 1e-4, "clip": 1.0},
        engine="inprocess",
        rounds=1,
        evaluate_every=1,
    )
    return az.run(experiment, out=out)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_is_trained_and_tested(tmp_path: Path, name: str, method: str) -> None:
    run = trained(name, method, tmp_path / "run")
    before, after = (flatten(state)[0] for state in (run.experiment.method.init(run.experiment.context), run.state))
    assert any(not torch.equal(before[key], tensor) for key, tensor in after.items())
    found = run.history[-1]["metrics"]
    assert all(torch.isfinite(torch.tensor(own["loss"])) for own in found.values())
    _, (x,) = TOPOLOGIES[name]()
    for size in run.sizes:
        with torch.no_grad():
            assert torch.isfinite(run.customize(size.label)(x)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_blocks_of_every_topology_that_has_some_are_removed(tmp_path: Path, name: str) -> None:
    if name not in WITH_BLOCKS:
        with pytest.raises(MethodError, match="no blocks that can be removed"):
            trained(name, "elf", tmp_path / "run")
        return
    run = trained(name, "elf", tmp_path / "run")
    costs = [run.cost(size) for size in run.sizes]
    assert costs[0].parameters < costs[-1].parameters
