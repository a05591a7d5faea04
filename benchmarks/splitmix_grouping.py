"""When a client's base networks should go through in one pass: the figures behind the rule of `elastic.grouping`.

    python benchmarks/splitmix_grouping.py            # a few minutes on one core; writes splitmix_grouping.json

Layers: forward and backward of convolutions in groups, against the same convolutions one after another.
Networks: a whole training step of Split-Mix's bases in one pass against one after another, as clients run them.
Under attack: the same where every base also trains on inputs that seven steps of PGD changed against it alone.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anysize import models
from anysize.client.objectives import make_objective
from anysize.elastic import grouping
from anysize.elastic.axes import trace
from anysize.elastic.ensemble import Networks
from anysize.elastic.fast import layout
from anysize.elastic.grouping import Grouped, GroupedConv2d, beside, grouped, pays, stacked
from anysize.elastic.norm import without_statistics
from anysize.elastic.skeleton import fill, hollow, tensors_of
from anysize.elastic.slicing import narrow
from anysize.methods.training import Batch, Tricks
from anysize.tasks import Classification

OUT = Path(__file__).with_suffix(".json")
BATCH = 32
COUNTS = (2, 4, 8)
# (inputs, outputs, kernel, side) of one base's convolution: those of the networks below, and wider ones.
LAYERS = [
    (4, 8, 3, 16), (8, 8, 5, 7), (8, 8, 5, 14), (8, 16, 5, 7), (8, 8, 3, 32), (8, 16, 3, 16), (16, 16, 3, 16),
    (16, 16, 5, 14), (16, 32, 3, 8), (32, 32, 3, 8), (32, 64, 3, 4), (64, 64, 3, 4), (32, 32, 3, 16),
]  # fmt: skip
# (network, input, width of a base)
NETWORKS = [
    ("mlp", (1, 28, 28), 0.125),
    ("mlp", (1, 28, 28), 0.25),
    ("small-cnn", (1, 28, 28), 0.25),
    ("digits-cnn", (3, 14, 14), 0.125),
    ("digits-cnn", (3, 28, 28), 0.125),
    ("digits-cnn", (3, 14, 14), 0.25),
    ("preresnet18", (3, 32, 32), 0.125),
]
ATTACKED = [("small-cnn", (1, 28, 28), 0.25), ("digits-cnn", (3, 14, 14), 0.125), ("digits-cnn", (3, 28, 28), 0.125)]


def best(step: Callable[[], None], seconds: float = 0.3) -> float:
    """The shortest of many runs, in milliseconds."""
    step()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        step()
        shortest = min(shortest, time.perf_counter() - began)
    return round(shortest * 1e3, 3)


def layer_times(shape: tuple[int, int, int, int], count: int) -> dict[str, Any]:
    """Forward and backward of one convolution, in groups and one after another."""
    inputs, outputs, kernel, side = shape
    layer = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
    wide = grouping.RULES[nn.Conv2d](layer, count)
    wide = layout(fill(wide, {f"{n}": torch.cat([t] * count) for n, t in tensors_of(layer).items()}))
    assert isinstance(wide, GroupedConv2d)
    x = torch.rand(BATCH, count * inputs, side, side).contiguous(memory_format=torch.channels_last).requires_grad_()

    def step() -> None:
        wide(x).sum().backward()

    def one_after_another() -> None:
        parts = zip(x.chunk(count, 1), wide.weight.chunk(count), wide.bias.chunk(count))
        outputs = [nn.functional.conv2d(*part, padding=kernel // 2) for part in parts]
        torch.cat(outputs, 1).sum().backward()

    in_groups, apart = best(step), best(one_after_another)
    chosen = pays(wide.weight.shape, x.shape, count)
    return {"shape": shape, "count": count, "in_groups_ms": in_groups, "apart_ms": apart, "rule": chosen}


def network_times(
    name: str, shape: tuple[int, ...], width: float, count: int, attacked: bool = False
) -> dict[str, Any]:
    """A training step of `count` bases, in one pass and one after another; under attack if asked."""
    full = without_statistics(models.build(name, shape, 10))
    base = narrow(full, trace(full, torch.zeros(2, *shape)), width)
    x = torch.rand(BATCH, *shape).contiguous(memory_format=torch.channels_last)
    y = torch.arange(BATCH) % 10
    structure, chosen = beside(hollow(base), count, attacked), grouped(hollow(base), count, [x], attacked)
    assert isinstance(structure, Grouped)
    together = layout(fill(structure, stacked([tensors_of(base)] * count)))
    apart = Networks({str(i): layout(fill(hollow(base), tensors_of(base))) for i in range(count)})
    loss = make_objective(Classification(), Tricks(adversarial=0.5 if attacked else 0.0), None)
    optimizers = [torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, fused=True) for net in (together, apart)]

    def one_pass() -> Tensor:
        given = torch.cat([x] * count) if attacked else x
        return count * loss(together, Batch(given, torch.cat([y] * count)))

    def one_after_another() -> Tensor:
        losses = [loss(net, Batch(x, y)) for net in apart.values()]
        return sum(losses[1:], start=losses[0])

    def step(objective: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        objective().backward()
        optimizer.step()

    seconds = 2.0 if attacked else 0.3
    times = [best(lambda o=o, s=s: step(o, s), seconds) for o, s in zip((one_pass, one_after_another), optimizers)]
    about = {"network": name, "input": shape, "width": width, "count": count, "rule": isinstance(chosen, Grouped)}
    return about | {"one_pass_ms": times[0], "apart_ms": times[1], "ratio": round(times[1] / times[0], 2)}


def main() -> None:
    """Measures, prints and writes."""
    torch.set_num_threads(1)
    layers = [layer_times(shape, count) for shape in LAYERS for count in COUNTS]
    networks = [network_times(*about, count) for about in NETWORKS for count in COUNTS]
    attacked = [network_times(*about, count, attacked=True) for about in ATTACKED for count in COUNTS]
    for row in (*layers, *networks, *attacked):
        print(json.dumps(row))
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    found = {"machine": machine, "batch": BATCH, "layers": layers, "networks": networks, "under_attack": attacked}
    OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
