"""A map of the time: what a client's step takes under every method, on six kinds of networks.

    python benchmarks/steps.py [network ...]          # writes benchmarks/steps.json

In a fleet of sizes 0.25, 0.5 and 1.0 a client of the middle one trains a few batches of 32 on one thread. Beside it,
in turns: the same sub-model in a plain PyTorch loop with torch's defaults, and the dense network of the same width,
trained as a HeteroFL client does. Each figure is the least CPU time of several turns, so that other processes hardly
touch it. `macs` are the step's multiply-adds as a multiple of the dense network's, and `against_macs` what the step
takes as a multiple of what they predict.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anysize.client.batches import draw
from anysize.client.process import hold_memory, one_thread
from anysize.client.step import client_loss
from anysize.client.work import perform
from anysize.config.files import from_dict
from anysize.data import Data, Share
from anysize.errors import AnysizeError
from anysize.methods.messages import Client, SubModel
from anysize.runs.experiment import Experiment

RESULTS = Path(__file__).parent / "steps.json"
BATCH, STEPS, TURNS = 32, 8, 7
SIZES = (0.25, 0.5, 1.0)
MIDDLE = 1  # the size, and the client, that are measured
METHODS = ("heterofl", "fedavg", "fjord", "sheterofl", "ladder", "splitmix", "flanc", "prism", "fedhm", "origdrop")
IMAGES, TOKENS = {"shape": [3, 32, 32]}, {"shape": [32], "tokens": 64}
NETWORKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small-cnn": ({"name": "small-cnn"}, {"shape": [1, 28, 28]}),
    "resnet18": ({"name": "resnet18", "options": {"channels": [16, 32, 64, 128]}}, IMAGES),
    "vit-tiny": ({"name": "vit-tiny", "options": {"width": 96, "depth": 4}}, IMAGES),
    "char-lstm": ({"name": "char-lstm", "options": {"hidden": 128}}, TOKENS),
    "mlp": ({"name": "mlp"}, {"shape": [1, 28, 28]}),
    "gpt": ({"name": "device_memory:gpt", "options": {"width": 96, "depth": 3}}, TOKENS),
}


def made_up(shape: list[int], tokens: int = 0) -> Data:
    """Random samples: images of a shape, or texts of tokens whose next tokens are the targets."""
    draws = torch.Generator().manual_seed(0)
    count = BATCH * STEPS * len(SIZES)
    if tokens:
        x = torch.randint(tokens, (count, *shape), generator=draws)
        return Data(train=(x, x.roll(-1, 1)), test=(x[:2], x[:2]), classes=tokens)
    x = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=draws)
    return Data(train=(x, torch.arange(count) % 10), classes=10)


def experiment(network: str, method: str) -> Experiment:
    """A client of each size, without tricks that differ between methods."""
    model, data = NETWORKS[network]
    tables = {
        "data": {"name": "steps:made_up", "options": data, "clients": len(SIZES), "split": "iid"},
        "model": model,
        "devices": {"capacities": list(SIZES), "assignment": "order"},
        "method": {"name": method},
        "training": {"batch_size": BATCH, "learning_rate": 0.01},
        "task": {"name": "next-token" if "tokens" in data else "classification"},
        "tricks": {"masked_loss": False, "classwise_head": False, "batch_norm": "batch"},
    }
    return Experiment.from_config(from_dict(tables))


def message_of(made: Experiment) -> SubModel:
    """What the client receives."""
    client = Client(MIDDLE, 0, made.sizes[MIDDLE], 1, BATCH * STEPS, 0)
    sent = made.method.extract(made.context, made.method.init(made.context), client)
    return replace(sent, ticket=replace(sent.ticket, rate=0.01))


def plain(made: Experiment, module: nn.Module, share: Share) -> None:
    """An epoch of a plain PyTorch loop with the method's loss."""
    loss = client_loss(made.context, made.method, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    module.train()
    for number, places in enumerate(torch.randperm(BATCH * STEPS).split(BATCH)):
        optimizer.zero_grad()
        loss(draw(share.train, places), number).backward()
        optimizer.step()


def cpu_seconds(function: Callable[[], object]) -> float:
    """The CPU time that it takes once."""
    began = time.process_time()
    function()
    return time.process_time() - began


def measured(network: str, method: str, dense: Callable[[], object], dense_macs: int) -> dict[str, float]:
    """Milliseconds of a step: ours, in the plain loop, and of the dense network; and what MACs predict."""
    made = experiment(network, method)
    message, share = message_of(made), made.shares.share(MIDDLE)
    module = made.method.build(made.context, message)
    sides = {
        "ours": partial(perform, made.context, made.method, message, share),
        "plain": partial(plain, made, module, share),
        "dense": dense,
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(TURNS + 1):  # the first warms up
        for name, run in sides.items():
            spent = cpu_seconds(run) / STEPS * 1000
            if turn:
                times[name].append(spent)
    least = {f"{name}_ms": round(min(values), 3) for name, values in times.items()}
    spread = {f"{name}_spread": round(max(values) / min(values) - 1, 3) for name, values in times.items()}
    macs = made.cost(made.sizes[MIDDLE]).training_macs / dense_macs
    ours = least["ours_ms"]
    return {
        **least,
        **spread,
        "against_plain": round(ours / least["plain_ms"], 3),
        "against_dense": round(ours / least["dense_ms"], 3),
        "macs": round(macs, 3),
        "against_macs": round(ours / least["dense_ms"] / macs, 3),
    }


def of_network(network: str) -> dict[str, Any]:
    """A row for every method that takes the network."""
    sliced = experiment(network, "heterofl")
    dense = partial(perform, sliced.context, sliced.method, message_of(sliced), sliced.shares.share(MIDDLE))
    macs = sliced.cost(sliced.sizes[MIDDLE]).training_macs
    rows: dict[str, Any] = {}
    for method in METHODS:
        try:
            rows[method] = measured(network, method, dense, macs)
        except AnysizeError as refusal:
            rows[method] = {"refused": str(refusal).splitlines()[0]}
        print(f"{network:10} {method:10} {rows[method]}", flush=True)
    return rows


def main(networks: list[str]) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    hold_memory()
    with one_thread():
        for network in networks or NETWORKS:
            found[network] = of_network(network)
    found["machine"] = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
