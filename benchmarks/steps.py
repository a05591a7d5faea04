"""A map of the time: what a client and its server take under every method, on six kinds of networks.

    python benchmarks/steps.py [network ...]          # about 15 minutes on one core; writes benchmarks/steps.json
    python benchmarks/steps.py --table                # prints it for the docs

In a fleet of sizes 0.25, 0.5 and 1.0 a client of the middle one trains batches of 32 on one thread. Beside it, in
turns: the same sub-model in a plain PyTorch loop with torch's defaults, and the dense network of the same width,
trained as a HeteroFL client does. Each figure is the least CPU time of several turns, so that other processes hardly
touch it; "spread" says how far the turns were apart.

    step_ms          the 16th part of a client's turn of 16 steps, all that it does once a turn included
    turn_ms          what it does once a turn: fill the network, make the optimizer, pack; from turns of 8 and 16 steps
    server_ms        what the server does for a client: extract and aggregate, the mean over a client of each size
    evaluate_ms      256 test samples at all sizes; plain_evaluate_ms the same by a plain loop
    calibrate_ms     a client's two passes for batch-norm statistics; absent where none are needed
    macs             the step's multiply-adds as a multiple of the dense network's
    against_macs     what the step takes as a multiple of what they predict
    outside          the share of a round outside the steps, if a client takes 16 of them
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anysize.client.batches import draw
from anysize.client.process import hold_memory, one_thread
from anysize.client.step import client_loss
from anysize.client.work import calibrated, needs_calibration, perform
from anysize.config.files import from_dict
from anysize.data import Data, Part, Share
from anysize.engines.base import Engine
from anysize.errors import AnysizeError
from anysize.experiment.experiment import evaluation_part
from anysize.inputs import mapped
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.training import Batch
from anysize.runs.experiment import Experiment
from anysize.server.judging import on_test
from anysize.server.round import run_round

OUT = Path(__file__).with_suffix(".json")
BATCH, STEPS, TURNS, TESTED = 32, 16, 15, 256
SIZES = (0.25, 0.5, 1.0)
MIDDLE = 1  # the size, and the client, that are measured
METHODS = (
    "heterofl", "fedavg", "fedrolex", "fjord", "sheterofl", "ladder", "splitmix", "flanc", "prism", "fedhm", "origdrop",
    "elf",
)  # fmt: skip
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
        return Data(train=(x, x.roll(-1, 1)), test=(x[:TESTED], x[:TESTED].roll(-1, 1)), classes=tokens)
    x = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=draws)
    y = torch.arange(count) % 10
    return Data(train=(x, y), test=(x[:TESTED], y[:TESTED]), classes=10)


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


def message_of(made: Experiment, state: Any, place: int = MIDDLE) -> SubModel:
    """What the client of a size receives."""
    client = Client(place, place, made.sizes[place], 1, BATCH * STEPS, 0)
    sent = made.method.extract(made.context, state, client)
    return replace(sent, ticket=replace(sent.ticket, rate=0.01))


def first(share: Share, steps: int) -> Share:
    """The samples of the first steps."""
    return Share(train=share.train.batch(torch.arange(BATCH * steps)))


def as_they_come(x: Any) -> Any:
    """Inputs in torch's default memory layout, which is what a plain loop has."""
    return mapped(x, lambda one: one.contiguous(memory_format=torch.contiguous_format))


def plain(made: Experiment, module: nn.Module, share: Share) -> None:
    """An epoch of a plain PyTorch loop with the method's loss."""
    loss = client_loss(made.context, made.method, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    module.train()
    for number, places in enumerate(torch.randperm(len(share.train)).split(BATCH)):
        drawn = draw(share.train, places)
        optimizer.zero_grad()
        loss(Batch(as_they_come(drawn.x), drawn.y), number).backward()
        optimizer.step()


def plain_evaluation(made: Experiment, state: Any, part: Part) -> None:
    """Correct answers of every size, counted by a plain PyTorch loop."""
    axis = made.context.task.class_axis
    for size in made.method.sizes(made.context):
        network = made.method.customize(made.context, state, size).eval()
        with torch.no_grad():
            drawn = draw(part, torch.arange(len(part)))
            (network(as_they_come(drawn.x)).argmax(axis) == drawn.y).sum().item()


class Answered(Engine):
    """Clients that have trained already: what is left of a round is the server's part."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self._updates = list(updates)

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update]:
        yield from (update for _, update in zip(sub_models, self._updates, strict=True))


def cpu_seconds(function: Callable[[], object]) -> float:
    """The CPU time that it takes once."""
    began = time.process_time()
    function()
    return time.process_time() - began


def in_turns(sides: dict[str, Callable[[], object]], turns: int = TURNS) -> tuple[dict[str, float], dict[str, float]]:
    """The least milliseconds of each side, and how far its turns were apart as a share of them."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):  # the first warms up
        for name, run in sides.items():
            spent = cpu_seconds(run) * 1000
            if turn:
                times[name].append(spent)
    return (
        {name: min(values) for name, values in times.items()},
        {name: round(max(values) / min(values) - 1, 3) for name, values in times.items()},
    )


def sides_of(made: Experiment, dense: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """What is measured under a method."""
    context, method = made.context, made.method
    state = method.init(context)
    message, share = message_of(made, state), made.shares.share(MIDDLE)
    module = method.build(context, message)
    clients = [Client(place, place, size, 1, BATCH * STEPS, 0) for place, size in enumerate(made.sizes)]
    updates = [
        perform(context, method, message_of(made, state, place), first(share, 1)) for place in range(len(clients))
    ]
    test = evaluation_part(made)
    ticket = replace(message.ticket, job="calibrate")
    return {
        "turn": partial(perform, context, method, message, first(share, STEPS)),
        "half": partial(perform, context, method, message, first(share, STEPS // 2)),
        "plain": partial(plain, made, module, first(share, STEPS)),
        "dense": dense,
        "server": partial(run_round, context, method, state, clients, Answered(updates), 0.01),
        "evaluate": partial(on_test, context, method, state, test, {}, TESTED, method.sizes(context)),
        "plain_evaluate": partial(plain_evaluation, made, state, test),
        "calibrate": partial(calibrated, context, method, replace(message, ticket=ticket), first(share, STEPS)),
    }


def measured(made: Experiment, dense: Callable[[], object], dense_macs: int) -> dict[str, Any]:
    """A row of the map."""
    least, spread = in_turns(sides_of(made, dense))
    step, dense_step, plain_step = (least[name] / STEPS for name in ("turn", "dense", "plain"))
    once, server = max(2 * least["half"] - least["turn"], 0.0), least["server"] / len(SIZES)
    macs = made.cost(made.sizes[MIDDLE]).training_macs / dense_macs
    row = {
        "step_ms": step,
        "plain_ms": plain_step,
        "dense_ms": dense_step,
        "turn_ms": once,
        "server_ms": server,
        "evaluate_ms": least["evaluate"],
        "plain_evaluate_ms": least["plain_evaluate"],
        **({"calibrate_ms": least["calibrate"]} if needs_calibration(made.context) else {}),
        "against_plain": step / plain_step,
        "against_dense": step / dense_step,
        "macs": macs,
        "against_macs": step / dense_step / macs,
        "evaluation_against_plain": least["evaluate"] / least["plain_evaluate"],
        "outside": (once + server) / (least["turn"] + server),
    }
    return {name: round(value, 3) for name, value in row.items()} | {"spread": spread}


def of_network(network: str) -> dict[str, Any]:
    """A row for every method that takes the network."""
    sliced = experiment(network, "heterofl")
    message = message_of(sliced, sliced.method.init(sliced.context))
    share = first(sliced.shares.share(MIDDLE), STEPS)
    dense = partial(perform, sliced.context, sliced.method, message, share)
    macs = sliced.cost(sliced.sizes[MIDDLE]).training_macs
    rows: dict[str, Any] = {}
    for method in METHODS:
        try:
            rows[method] = measured(experiment(network, method), dense, macs)
        except AnysizeError as refusal:
            rows[method] = {"refused": str(refusal).splitlines()[0]}
        print(f"{network:10} {method:10} {rows[method]}", flush=True)
    return rows


def table(found: dict[str, Any]) -> str:
    """The map as Markdown: a line for each network and method."""
    lines = [
        "| network | method | step, ms | of a plain loop's | of the dense network's | of what MACs predict |"
        " outside the steps | evaluation, of a plain loop's |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for network, rows in found.items():
        if network not in NETWORKS:
            continue
        for method, row in rows.items():
            if "refused" in row:
                continue
            shown = [f"{row[name]:.2f}" for name in ("step_ms", "against_plain", "against_dense", "against_macs")]
            shown += [f"{100 * row['outside']:.0f} %", f"{row['evaluation_against_plain']:.2f}"]
            lines.append(f"| {network} | {method} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(networks: list[str]) -> None:
    """Measures the networks named, by default all, and writes them down."""
    found = json.loads(OUT.read_text()) if OUT.exists() else {}
    hold_memory()
    with one_thread():
        for network in networks or NETWORKS:
            found[network] = of_network(network)
            found["machine"] = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
            OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main(sys.argv[1:])
