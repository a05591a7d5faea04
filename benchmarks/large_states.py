"""A server with a large state: extract, aggregate and checkpoint against the speed of memory, and the peak of memory.

    python benchmarks/large_states.py             # a few minutes on one core; writes benchmarks/large_states.json
    python benchmarks/large_states.py --table     # prints it for the docs

States have the size of ResNet-50, of BERT-base, and 300 million parameters. Clients have the full width and half of it,
and have trained already, so that only the server works. Every case is a process of its own, on one thread.

    extract, aggregate   bytes of the messages and updates a second, as a share of those that `copy_` copies
    checkpoint           bytes of the state a second of processor time, written and synced, as a share of the same
    written              bytes of the checkpoint a second of time on the clock, as a share of what the disk takes if as
                         many bytes are written to a file and synced; in turns
    peak                 the most memory of a round, the state before it included, as a multiple of the state
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anysize.client.process import hold_memory, one_thread
from anysize.config.files import from_dict
from anysize.data import Data
from anysize.engines.base import Engine
from anysize.methods.messages import Client, SubModel, Update
from anysize.records.checkpoint import Checkpoint, save
from anysize.runs.experiment import Experiment
from anysize.server.round import run_round
from anysize.wire import flatten

OUT = Path(__file__).with_suffix(".json")
TURNS = 3
IMAGES, TOKENS = {"shape": [3, 32, 32]}, {"shape": [16], "tokens": 1000}
STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "25 million": ({"name": "resnet18", "options": {"channels": [96, 192, 384, 768]}}, IMAGES),
    "110 million": ({"name": "device_memory:gpt", "options": {"width": 864, "depth": 12, "heads": 12}}, TOKENS),
    "300 million": ({"name": "device_memory:gpt", "options": {"width": 1024, "depth": 24, "heads": 16}}, TOKENS),
}
METHODS = ("fedavg", "heterofl")


def made_up(shape: list[int], tokens: int = 0) -> Data:
    """A few samples: only their shapes matter."""
    if tokens:
        x = torch.zeros(8, *shape, dtype=torch.int64)
        return Data(train=(x, x), test=(x, x), classes=tokens)
    x, y = torch.zeros(8, *shape), torch.arange(8)
    return Data(train=(x, y), test=(x, y), classes=10)


def experiment(state: str, method: str) -> Experiment:
    """Clients of full and of half width; under FedAvg, of the full width alone."""
    model, data = STATES[state]
    tables = {
        "data": {"name": "large_states:made_up", "options": data, "clients": 2},
        "model": model,
        "devices": {"capacities": [1.0] if method == "fedavg" else [0.5, 1.0]},
        "method": {"name": method},
        "task": {"name": "next-token" if "tokens" in data else "classification"},
        "tricks": {"batch_norm": "batch", "classwise_head": False},
    }
    return Experiment.from_config(from_dict(tables))


class Echoes(Engine):
    """Clients that send back what they got, as if they had trained it."""

    def perform(self, sub_models: Iterable[SubModel]) -> Iterator[Update]:
        for message in sub_models:
            yield Update(message.tensors, message.ticket, samples=4, loss=0.0)


def size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def least(function: Callable[[], object]) -> float:
    """The shortest of several calls in seconds of CPU time, after one that warms up."""
    function()
    times = []
    for _ in range(TURNS):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def in_turns(*sides: Callable[[], object]) -> list[float]:
    """The shortest time of each side on the clock, of several turns."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(TURNS):
        for side, own in zip(sides, times):
            began = time.perf_counter()
            side()
            own.append(time.perf_counter() - began)
    return [min(own) for own in times]


def write_and_sync(path: Path, content: bytes) -> None:
    """What any program must do so that a file is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def copied_bytes_per_second() -> float:
    """How many bytes `copy_` copies in a second, between tensors of the size of a large layer."""
    source, target = torch.ones(25_000_000), torch.empty(25_000_000)
    return size_bytes([source]) / least(lambda: target.copy_(source))


def clients_of(made: Experiment, count: int) -> list[Client]:
    """Clients of the sizes in turn, the largest first."""
    sizes = sorted(made.sizes, key=lambda size: -size.width)
    return [Client(place, place, sizes[place % len(sizes)], 1, 4, 0) for place in range(count)]


def speeds(state: str, method: str) -> dict[str, float]:
    """The speeds of a server, as shares of the speed of a copy."""
    made = experiment(state, method)
    held = made.method.init(made.context)
    clients, copied = clients_of(made, 4), copied_bytes_per_second()
    messages = [made.method.extract(made.context, held, client) for client in clients]
    updates = [Update(message.tensors, message.ticket, samples=4, loss=0.0) for message in messages]
    moved = sum(size_bytes(message.tensors.values()) for message in messages)
    extract = least(lambda: any(made.method.extract(made.context, held, client).finished for client in clients))
    aggregate = least(lambda: made.method.aggregate(made.context, held, iter(updates)))
    whole = size_bytes(flatten(held)[0].values())
    with tempfile.TemporaryDirectory() as folder:
        write = partial(save, Path(folder), Checkpoint(1, held), {})
        written = least(write)
        saved, plain = in_turns(write, partial(write_and_sync, Path(folder) / "plain", bytes(whole)))
    return {
        "state_mb": round(whole / 1e6),
        "copied_mb_per_second": round(copied / 1e6),
        "extract": round(moved / extract / copied, 3),
        "aggregate": round(moved / aggregate / copied, 3),
        "checkpoint": round(whole / written / copied, 3),
        "written": round(plain / saved, 3),
        "disk_mb_per_second": round(whole / plain / 1e6),
    }


def peak(state: str, method: str, count: str) -> dict[str, float]:
    """The most memory of a round of so many clients with the state before it, as a multiple of the state."""
    made = experiment(state, method)
    held = made.method.init(made.context)
    whole, before = size_bytes(flatten(held)[0].values()), resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    after, _ = run_round(made.context, made.method, held, clients_of(made, int(count)), Echoes(), 0.01)
    assert after is not held
    return {"peak": round(1 + (resident_bytes("VmHWM") - before) / whole, 2)}


def resident_bytes(kind: str) -> int:
    """This process's memory as the kernel counts it: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(kind))) * 1024


def in_new_process(*call: str) -> dict[str, float]:
    """What a function of this file finds in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--call", *call], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = [
        "| parameters | method | extract | aggregate | checkpoint | of a plain write | peak, 2 clients | 16 clients |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        speeds = (row[name] for name in ("extract", "aggregate", "checkpoint", "written"))
        shares = " | ".join("no copy" if speed > 10 else f"{100 * speed:.0f}%" for speed in speeds)
        lines.append(f"| {row['state']} | {row['method']} | {shares} | {row['peak_2']:.1f} | {row['peak_16']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measures everything and writes it down."""
    rows = []
    for state in STATES:
        for method in METHODS:
            peaks = {f"peak_{count}": in_new_process("peak", state, method, count)["peak"] for count in ("2", "16")}
            rows.append({"state": state, "method": method, **in_new_process("speeds", state, method), **peaks})
            print(rows[-1], flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    before = json.loads(OUT.read_text()).get("before") if OUT.exists() else None
    found = {"machine": machine, "rows": rows, **({} if before is None else {"before": before})}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    elif "--call" in sys.argv:
        hold_memory()
        with one_thread():
            print(json.dumps(globals()[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
