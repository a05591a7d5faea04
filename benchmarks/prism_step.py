"""What a PriSM client saves, and what its server pays: ResNet-18, batch 32, one thread. Writes benchmarks/prism.json.

    python benchmarks/prism_step.py

Times alternate between the full network and the sub-model; each is the median of several steps. The round is the
paper's: 20 clients with 500 samples each, 2 local epochs. Its training time is the time of a step times the steps;
extracting, averaging and decomposing are timed for one client and for the server.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anysize.client.batches import draw
from anysize.client.objectives import make_objective
from anysize.client.optimizer import make_optimizer
from anysize.client.process import hold_memory, one_thread
from anysize.cost.count import Cost
from anysize.data import Data
from anysize.elastic.fast import layout
from anysize.methods import Client, FedAvg, Method, PriSM
from anysize.methods.prism import refreshed
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.runs.experiment import Experiment

RESULTS = Path(__file__).parent / "prism.json"
BATCH, KEEP = 32, 0.2
CLIENTS, SAMPLES, EPOCHS = 20, 500, 2
STEPS = 7
MOST_TIME, MOST_ACTIVATIONS, MOST_SVD = 0.15, 0.35, 0.05


def experiment(method: Method[Any], capacity: float) -> Experiment:
    """ResNet-18 on images of CIFAR-10's shape."""
    x = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Experiment(
        data=Data(train=(x, torch.arange(64) % 10), classes=10),
        clients=2,
        model="resnet18",
        method=method,
        devices={"capacities": [capacity]},
        training={"batch_size": BATCH, "learning_rate": 0.1, "weight_decay": 2e-4},
        tricks={"batch_norm": "batch"},
    )


def stepper(made: Experiment) -> Callable[[], None]:
    """One training step of a client, as `local.train` does it."""
    context, method = made.context, made.method
    message = method.extract(context, method.init(context), Client(0, 0, context.largest, 1, 32, 0))
    module: nn.Module = layout(method.build(context, message)).train()
    optimizer = make_optimizer(context, method, module, 0.1)
    batch = draw(made.shares.share(0).train, torch.arange(BATCH))
    step = Step(0, torch.Generator(), {}, make_objective(context.task, context.tricks, None))

    def run() -> None:
        optimizer.zero_grad()
        method.loss(module, Batch(batch.x, batch.y), step).backward()
        optimizer.step()

    return run


def seconds(run: Callable[[], object]) -> float:
    """How long it takes once."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def cost(made: Experiment) -> Cost:
    """What a client of the experiment computes, holds and sends."""
    return made.cost(made.context.largest)


def server_seconds(made: Experiment) -> dict[str, float]:
    """Extracting for one client, averaging one update, and the refresh of all layers."""
    context, method = made.context, made.method
    assert isinstance(method, PriSM)
    state = method.init(context)
    rarely = replace(method, refresh_every=10)
    client = Client(0, 0, Size(KEEP), 1, SAMPLES, 0)
    message = method.extract(context, state, client)
    update = method.pack(method.build(context, message), message)
    update = replace(update, samples=SAMPLES, loss=0.0)

    def average(count: int) -> float:
        return seconds(lambda: rarely.aggregate(context, state, iter([update] * count)))

    svd = statistics.median(seconds(lambda: refreshed(state, state)) for _ in range(3))
    one, several = average(1), average(5)
    return {
        "create": statistics.median(seconds(lambda: method.extract(context, state, client)) for _ in range(3)),
        "aggregate_first": one,
        "aggregate_further": (several - one) / 4,
        "svd": svd,
    }


def measure() -> dict[str, Any]:
    """All figures."""
    full, small = experiment(FedAvg(), 1.0), experiment(PriSM(), KEEP)
    runs = {"full": stepper(full), "prism": stepper(small)}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(STEPS):
        for name, run in runs.items():
            times[name].append(seconds(run))
    step = {name: statistics.median(own) for name, own in times.items()}
    costs = {"full": cost(full), "prism": cost(small)}
    server = server_seconds(small)
    steps = CLIENTS * EPOCHS * -(-SAMPLES // BATCH)
    stages = {
        "create": CLIENTS * server["create"],
        "train": steps * step["prism"],
        "aggregate": server["aggregate_first"] + (CLIENTS - 1) * server["aggregate_further"],
        "svd": server["svd"],
    }
    ratios = {
        "step_time": step["prism"] / step["full"],
        "activation_bytes": costs["prism"].activation_bytes / costs["full"].activation_bytes,
        "training_macs": costs["prism"].training_macs / costs["full"].training_macs,
        "parameters": costs["prism"].parameters / costs["full"].parameters,
        "svd_of_round": stages["svd"] / sum(stages.values()),
    }
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1},
        "keep": KEEP,
        "batch": BATCH,
        "step_seconds": _rounded(step),
        "activation_bytes": {name: own.activation_bytes for name, own in costs.items()},
        "round_seconds": _rounded(stages),
        "ratios": _rounded(ratios),
        "allowed": {"step_time": MOST_TIME, "activation_bytes": MOST_ACTIVATIONS, "svd_of_round": MOST_SVD},
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def main() -> None:
    """Measures, prints and writes; ends with an error if a figure is above what is allowed."""
    hold_memory()
    with one_thread():
        found = measure()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    above = [name for name, most in found["allowed"].items() if found["ratios"][name] > most]
    if above:
        raise SystemExit(f"above what is allowed: {', '.join(above)}")


if __name__ == "__main__":
    main()
