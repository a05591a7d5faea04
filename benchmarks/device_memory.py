"""The memory of a device: what answering one message takes, above a process that has only imported what it needs.

Every measurement is a process of its own, which does what the worker of `anysize join` does: it reads the device's
file, learns the experiment from the server's hello, checks the message, trains, and packs the answer. The peak of its
resident memory is read from /proc, and so is what it has before the message comes. Every measurement is made three
times, since no two processes place their blocks of memory alike.

`python benchmarks/device_memory.py` writes benchmarks/device_memory.json; `--table` prints it for the docs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("device_memory.json")
CAPACITIES = [0.2, 1.0]
REPEATS = 3
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


def message(name: str, capacity: float, folder: Path) -> None:
    """Write what a device of a capacity needs into a folder: its file, its data, and the server's message."""
    from anysize import config as configs
    from anysize.experiment.brief import Brief
    from anysize.methods.messages import Client
    from anysize.runs.experiment import Experiment
    from anysize.wire import dump

    about = {**NETWORKS, **OTHERS}[name]
    tables = {
        **about,
        "data": {"name": "devices"},
        "method": {"name": "heterofl" if capacity < 1 else "fedavg"},
        "devices": {"capacities": [capacity]},
        "tricks": {"classwise_head": False},
        "training": {**about["training"], "local_steps": 4},
        "engine": {"name": "flower"},
    }
    made = Experiment.from_config(configs.from_dict(tables))
    state = made.method.init(made.context)
    size = made.sizes[-1]
    cut = made.method.extract(made.context, state, Client(0, 0, size, 1, 1, 0))
    ticket = replace(cut.ticket, rate=0.1)
    hello = {"run": "0a", "brief": Brief.of(made).to_json()}
    note = {"hello": hello, "tickets": [ticket.to_json()]}
    (folder / "note.json").write_text(json.dumps(note))
    (folder / "predicted").write_text(str(made.cost(size, state=state).memory_bytes))
    (folder / "blob").write_bytes(dump(cut.tensors, {}))
    (folder / "own_frames.py").write_text(DATA)
    shape, tokens = about["model"]["input"], json.dumps("name" in about["task"])
    (folder / "device.toml").write_text(
        f'name = "board"\nserver = "localhost:9092"\ndata = "own_frames:load"\ncapacity = {capacity}\n'
        f'options = {{ shape = {shape}, tokens = {tokens}, count = 128 }}\nallow = ["{OWN}"]\n'
    )


def answer(folder: Path) -> dict[str, int]:
    """What this process holds before and at most while it answers a message, and what is predicted; in bytes."""
    import torch  # noqa: F401

    import anysize  # noqa: F401
    from anysize.deploy.client import Service
    from anysize.engines.flower_records import note_in, record, with_note

    idle = resident("VmRSS")
    service = Service(folder / "device.toml")
    content = with_note(json.loads((folder / "note.json").read_text()), record([(folder / "blob").read_bytes()]))
    told = note_in(service.reply("train", content))
    assert "failure" not in told, told["failure"]
    return {"idle": idle, "peak": resident("VmHWM"), "predicted": int((folder / "predicted").read_text())}


def resident(what: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def main() -> None:
    """Measure every network at both capacities and write it down."""
    from anysize.runs.runner import environment

    found: dict[str, Any] = {"environment": environment(), "networks": {}}
    for name in (*NETWORKS, *OTHERS):
        found["networks"][name] = {str(capacity): measured(name, capacity) for capacity in CAPACITIES}
        OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def measured(name: str, capacity: float) -> list[dict[str, int]]:
    """One network at a capacity, in processes of their own."""
    with tempfile.TemporaryDirectory() as home:
        run("--message", home, name, str(capacity))
        return [json.loads(run("--answer", home)) for _ in range(REPEATS)]


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
            cells.append(f"{middles[-1]:.0f} MB ({took[0]:.0f} to {took[-1]:.0f})")
            cells.append(f"{own[0]['predicted'] / 1e6:.0f} MB ({off:+.0%})")
        lines.append(f"| {name} | {' | '.join(cells)} | {middles[0] / middles[1]:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--message" in sys.argv:
        message(sys.argv[3], float(sys.argv[4]), Path(sys.argv[2]))
    elif "--answer" in sys.argv:
        print(json.dumps(answer(Path(sys.argv[2]))))
    elif "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main()
