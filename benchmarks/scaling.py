"""Towards 100,000 devices: bytes, server memory and server time of a round for each method.

Bytes are those of the cost model, which are those on the wire. A server's time for one device is measured here:
cutting its sub-model, writing and reading both messages, checking the update, folding it in, in seconds of one core; so
is the memory that a round takes, in a process of its own, for two numbers of devices. The rest is multiplication.

`python benchmarks/scaling.py` writes benchmarks/scaling.json; `--table` prints it for the docs.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anysize import config as configs
from anysize.deploy.guard import Guard
from anysize.methods.messages import Client, SubModel, Update
from anysize.runs.experiment import Experiment
from anysize.runs.runner import environment
from anysize.wire import dump, flatten, load

OUT = Path(__file__).with_name("scaling.json")
FLEET = Path(__file__).with_name("fleet.json")
REGISTERED, TAKING_PART = 100_000, 1_000
LINK_BYTES_PER_SECOND = 125e6  # a gigabit each way
POLL_SECONDS = 3.0  # of a device that has had nothing to do for a while
FEW, MORE = 4, 12
SIZES = [0.25, 0.5, 0.75, 1.0]
METHODS: dict[str, dict[str, Any]] = {
    "full model": {"method": {"name": "fedavg"}, "devices": {"capacities": [1.0]}},
    "heterofl": {"method": {"name": "heterofl"}},
    "flanc": {"method": {"name": "flanc"}},
    "prism": {"method": {"name": "prism"}},
    "splitmix": {"method": {"name": "splitmix"}},
}


def experiment(name: str) -> Experiment:
    """A ResNet-18 for images of 32 x 32 pixels on devices of four sizes, a quarter of the fleet each."""
    tables: dict[str, Any] = {
        "data": {"name": "devices"},
        "model": {"name": "resnet18", "input": [3, 32, 32]},
        "task": {"classes": 10},
        "devices": {"capacities": SIZES},
        "tricks": {"classwise_head": False},
        "training": {"batch_size": 32},
        "engine": {"name": "flower"},
    }
    return Experiment.from_config(configs.from_dict(tables | METHODS[name]))


def measured(name: str) -> dict[str, Any]:
    """One method: bytes of each size, the server's seconds for a device, and its memory."""
    torch.set_num_threads(1)
    made = experiment(name)
    context, method = made.context, made.method
    state = method.init(context)
    costs = {size.label: made.cost(size, state=state) for size in context.sizes}
    tensors, _ = flatten(state)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    seconds, few = one_round(made, state, FEW)
    _, more = one_round(made, state, MORE)
    return {
        "bytes_down": {label: cost.bytes_down for label, cost in costs.items()},
        "bytes_up": {label: cost.bytes_up for label, cost in costs.items()},
        "state_bytes": held,
        "server_seconds_per_device": seconds,
        "peak_bytes": {FEW: few, MORE: more},
    }


def one_round(made: Experiment, state: Any, count: int) -> tuple[float, int]:
    """The server's seconds for one of `count` devices that send back what they got, and the process's peak memory."""
    context, method, guard = made.context, made.method, Guard.of(made)
    spent = 0.0

    def updates() -> Iterator[Update]:
        nonlocal spent
        for client in range(count):
            began = time.process_time()
            size = context.sizes[client % len(context.sizes)]
            cut = method.extract(context, state, Client(client, client, size, 1, 1, 0))
            ticket = replace(cut.ticket, rate=0.1)
            down = dump(cut.tensors, {})
            spent += time.process_time() - began
            there = SubModel(load(down)[0], ticket)
            packed = method.pack(method.build(context, there), there)
            up = dump({name: tensor.detach() for name, tensor in packed.tensors.items()}, {})
            told = replace(packed, loss=1.0).to_json()
            began = time.process_time()
            update = guard(SubModel(load(down)[0], ticket), load(up)[0], told)
            assert isinstance(update, Update), update
            spent += time.process_time() - began
            yield update

    began = time.process_time()
    drawn = 0.0

    def timed() -> Iterator[Update]:
        nonlocal drawn
        source = updates()
        while True:
            start = time.process_time()
            update = next(source, None)
            drawn += time.process_time() - start
            if update is None:
                return
            yield update

    method.aggregate(context, state, timed())
    folding = time.process_time() - began - drawn
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (spent + folding) / count, peak


def main() -> None:
    """Measures each method in a process of its own and writes it down."""
    found: dict[str, Any] = {"environment": environment(), "methods": {}}
    command = [sys.executable, __file__, "--one"]
    running = {name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in METHODS}
    for name, process in running.items():
        found["methods"][name] = json.loads(process.communicate()[0])
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """A round of 1,000 devices out of 100,000, as Markdown."""
    head = "| method | smallest device | largest | round, out | in | at 1 Gbit/s | server time | state | peak |"
    lines = [head, "| --- " + "| ---: " * 8 + "|"]
    for name, about in found["methods"].items():
        down, up = about["bytes_down"], about["bytes_up"]
        each = TAKING_PART / len(down)
        out, back = each * sum(down.values()), each * sum(up.values())
        small, large = (next(iter(sorted(down, key=float, reverse=r))) for r in (False, True))
        busy = TAKING_PART * about["server_seconds_per_device"]
        grows = about["peak_bytes"][str(MORE)] - about["peak_bytes"][str(FEW)]
        cells = [
            name,
            _mb(down[small] + up[small]),
            _mb(down[large] + up[large]),
            f"{out / 1e9:.1f} GB",
            f"{back / 1e9:.1f} GB",
            f"{max(out, back) / LINK_BYTES_PER_SECOND:.0f} s",
            f"{busy:.0f} s",
            _mb(about["state_bytes"]),
            f"{about['peak_bytes'][str(MORE)] / 1e6:.0f} MB ({grows / 1e6:+.0f})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if FLEET.exists():
        polls = json.loads(FLEET.read_text())["polls_per_second"]
        asked = REGISTERED / POLL_SECONDS
        lines += [
            "",
            f"At rest, {REGISTERED:,} connected devices ask {asked:,.0f} times a second; one SuperLink here answers "
            f"{polls:,.0f}, which is {polls * POLL_SECONDS:,.0f} devices.",
        ]
    return "\n".join(lines)


def _mb(amount: float) -> str:
    return f"{amount / 1e6:.2f} MB" if amount < 1e7 else f"{amount / 1e6:.1f} MB"


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(json.dumps(measured(sys.argv[-1])))
    elif "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main()
