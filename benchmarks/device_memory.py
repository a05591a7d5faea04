"""The memory of a device: what its worker takes on a fleet, above one that has only imported what it needs.

Every measurement is a real fleet on this machine, of a device of each capacity that joined with `anysize join`: it
fetches messages, trains for some rounds, sends its updates, and evaluates. The peak of its worker's resident memory is
read from /proc. Fleets are made more than once, since no two processes place their blocks of memory alike.

`python benchmarks/device_memory.py` writes benchmarks/device_memory.json, or only the rows of the networks
that it names; `--table` prints it for the docs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("device_memory.json")
CAPACITIES = [0.2, 1.0]
REPEATS = 3
ROUNDS = 3
IMAGES = {"model": {"input": [3, 32, 32]}, "task": {"classes": 10}}
TOKENS = {"model": {"input": [128]}, "task": {"name": "next-token", "classes": 128}}
OWN = "device_memory:gpt"


def trained(name: str, about: dict[str, Any], batch_size: int, **options: Any) -> dict[str, Any]:
    """The tables of an experiment with a network."""
    model = {**about["model"], "name": name, "options": options}
    return {**about, "model": model, "training": {"batch_size": batch_size}}


NETWORKS = {
    "small-cnn": trained("small-cnn", IMAGES, 32),
    "resnet18": trained("resnet18", IMAGES, 32),
    "vit-tiny": trained("vit-tiny", IMAGES, 32),
    "gpt": trained(OWN, TOKENS, 16),
    "char-lstm": trained("char-lstm", TOKENS, 64),
}
"""The constants of `anysize.cost.memory` come from these."""
OTHERS = {
    "mlp": trained("mlp", IMAGES, 64, hidden=[2048, 1024]),
    "vgg11": trained("vgg11", IMAGES, 64),
    "resnet20": trained("resnet20", IMAGES, 128),
    "gpt, narrow and deep": trained(OWN, TOKENS, 8, width=192, depth=12, heads=3),
}
"""These are only predicted."""
DATA = """
import anysize as az
import torch

def load(device, shape, tokens, count):
    x = torch.arange(count * torch.Size(shape).numel()).reshape(count, *shape) % 128
    return az.Share(train=(x, x) if tokens else (x / 128, torch.arange(count) % 10))
"""


def gpt(input_shape: tuple[int, ...], classes: int, width: int = 384, depth: int = 6, heads: int = 6) -> Any:
    """A network like GPT-2: blocks of causal attention over tokens (N, T), the next token's logits (N, T, V)."""
    from torch import nn

    from anysize.models.attention import Block

    class Causal(Block):
        def forward(self, x: Any) -> Any:
            seen = self.norm1(x)
            parts = [layer(seen).unflatten(-1, (self.heads, -1)) for layer in (self.queries, self.keys, self.values)]
            parts = [part.transpose(1, 2) for part in parts]
            mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.contract(self.active(self.expand(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(classes, width)
            self.position = nn.Embedding(input_shape[0], width)
            self.blocks = nn.Sequential(*(Causal(width, heads, 4 * width) for _ in range(depth)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, classes, bias=False)

        def forward(self, x: Any) -> Any:
            import torch

            places = torch.arange(x.shape[1], device=x.device)
            return self.head(self.norm(self.blocks(self.tokens(x) + self.position(places))))

    return Gpt()


def experiment(name: str) -> str:
    """The file of an experiment with a network, for devices of both capacities."""
    from anysize import config as configs

    about = {**NETWORKS, **OTHERS}[name]
    tables = {
        **about,
        "name": "memory",
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "data": {"name": "devices", "validation": 0.2},
        "method": {"name": "heterofl"},
        "devices": {"capacities": CAPACITIES},
        "tricks": {"classwise_head": False},
        "training": {**about["training"], "local_steps": 4},
        "engine": {"name": "flower", "min_clients": len(CAPACITIES), "round_timeout": 600.0},
    }
    return configs.dumps(configs.from_dict(tables))


def predicted(file: Path) -> dict[str, int]:
    """The `memory_bytes` of every size of an experiment, as a budget is held against it."""
    from anysize import config as configs
    from anysize.runs.experiment import Experiment

    made = Experiment.from_config(configs.load(file))
    state = made.method.init(made.context)
    return {size.label: int(made.cost(size, state=state).memory_bytes) for size in made.sizes}


def peaks(name: str, folder: Path) -> dict[str, int]:
    """The peak of each device's worker on a fleet that trains a network, by capacity."""
    from loopback import Loopback, processes_of

    (folder / "own_frames.py").write_text(DATA)
    about = {**NETWORKS, **OTHERS}[name]
    shape, tokens = about["model"]["input"], json.dumps("name" in about["task"])
    more = f'options = {{ shape = {shape}, tokens = {tokens}, count = 128 }}\nallow = ["{OWN}"]\n'
    devices = {f"board-{number}": capacity for number, capacity in enumerate(CAPACITIES)}
    with Loopback(folder / "fleet", experiment(name), devices, "own_frames:load") as fleet:
        for device in devices:
            file = fleet.home / "devices" / device / "device.toml"
            kept = [line for line in file.read_text().splitlines() if not line.startswith(("options", "allow"))]
            file.write_text("\n".join([*kept, more]))
            (file.parent / "own_frames.py").write_text(DATA)
        fleet.serve()
        fleet.join()
        for device in devices:
            fleet.wait(lambda device=device: "joined as node" in fleet.log(device), 600, device)  # type: ignore[misc]
        fleet.run()
        fleet.finished(1800)
        found = {}
        for device, capacity in devices.items():
            own = [pid for pid, _ in processes_of(fleet.home) if parent(pid) == fleet.pid(device)]
            assert len(own) == 1, f"{device} has the processes {own}"
            found[str(capacity)] = memory("VmHWM", own[0])
        return found


def parent(pid: int) -> int:
    """The process that started another."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def memory(what: str, pid: int | str = "self") -> int:
    """VmRSS or VmHWM of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def idle() -> int:
    """What a device's worker holds that has imported all that it needs, and has done nothing."""
    from anysize.engines.start import quick_start

    quick_start()
    from anysize.deploy import worker  # noqa: F401

    return memory("VmRSS")


def main(*names: str) -> None:
    """Measure every network, or those of these names, and write it down."""
    from anysize.runs.runner import environment

    resting = [int(run("--idle")) for _ in range(REPEATS)]
    before = json.loads(OUT.read_text())["networks"] if names else {}
    found: dict[str, Any] = {"environment": environment(), "networks": before}
    for name in names or (*NETWORKS, *OTHERS):
        found["networks"][name] = measured(name, resting)
        OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def measured(name: str, idle: Sequence[int]) -> dict[str, list[dict[str, int]]]:
    """One network: a fleet for each measurement of an idle worker."""
    rows: dict[str, list[dict[str, int]]] = {str(capacity): [] for capacity in CAPACITIES}
    for resting in idle:
        with tempfile.TemporaryDirectory() as home:
            found = peaks(name, Path(home))
            told = json.loads(run("--predicted", str(Path(home) / "fleet" / "experiment.toml")))
        for capacity, peak in found.items():
            rows[capacity].append({"idle": resting, "peak": peak, "predicted": told[capacity]})
    return rows


def run(*arguments: str) -> str:
    """What this script prints in a process of its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def table(found: dict[str, Any]) -> str:
    """The memory of a device above an idle one, as Markdown: the median, and the least and the most of the repeats."""
    head = "| network | capacity 0.2 | predicted | full model | predicted | part |"
    lines = [head, "| --- " + "| ---: " * 5 + "|"]
    for name, about in found["networks"].items():
        cells, middles = [], []
        for own in (about[str(capacity)] for capacity in CAPACITIES):
            took = sorted((one["peak"] - one["idle"]) / 1e6 for one in own)
            middles.append(statistics.median(took))
            off = own[0]["predicted"] / 1e6 / middles[-1] - 1
            span = f" ({took[0]:.0f} to {took[-1]:.0f})" if len(took) > 1 else ""
            cells.append(f"{middles[-1]:.0f} MB{span}")
            cells.append(f"{own[0]['predicted'] / 1e6:.0f} MB ({off:+.0%})")
        lines.append(f"| {name} | {' | '.join(cells)} | {middles[0] / middles[1]:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for loopback
    here = str(Path(__file__).resolve().parent)  # for the network of this file
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, here)
    if "--idle" in sys.argv:
        print(idle())
    elif "--predicted" in sys.argv:
        print(json.dumps(predicted(Path(sys.argv[2]))))
    elif "--once" in sys.argv:
        print(json.dumps(measured(sys.argv[2], [int(run("--idle"))])))
    elif "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main(*sys.argv[1:])
