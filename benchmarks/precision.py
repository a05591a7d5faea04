"""What bf16 saves: a client's step in bf16 against the same step in float32, on networks of two sizes.

    python benchmarks/precision.py             # about four minutes on one core; writes benchmarks/precision.json
    python benchmarks/precision.py --table     # prints it for the docs

A HeteroFL client of half the width trains batches of 32 on one thread, in float32 and in bf16 in turns. Each figure is
the least CPU time of several turns. "loss" is how far the mean losses of the turns are apart.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anysize.client.accelerators import precision
from anysize.client.process import hold_memory, one_thread
from anysize.client.work import perform

OUT = Path(__file__).with_suffix(".json")
KINDS = ("float32", "bf16")
STEPS, TURNS = 4, 6
IMAGES, TOKENS = {"shape": [3, 32, 32]}, {"shape": [32], "tokens": 64}
LARGER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resnet18, 256 channels": ({"name": "resnet18", "options": {"channels": [64, 128, 256, 256]}}, IMAGES),
    "vit-tiny, 384 wide": ({"name": "vit-tiny", "options": {"width": 384, "depth": 4, "heads": 6}}, IMAGES),
    "char-lstm, 512 wide": ({"name": "char-lstm", "options": {"hidden": 512}}, TOKENS),
    "mlp, 2048 wide": ({"name": "mlp", "options": {"hidden": [2048, 2048]}}, {"shape": [1, 28, 28]}),
    "gpt, 384 wide": ({"name": "device_memory:gpt", "options": {"width": 384, "depth": 3}}, TOKENS),
}


def measured(network: str) -> dict[str, float]:
    """Milliseconds of a step in both precisions."""
    from steps import MIDDLE, experiment, first, message_of  # beside this file, which tests load by its path

    made = experiment(network, "heterofl")
    message, share = message_of(made, made.method.init(made.context)), first(made.shares.share(MIDDLE), STEPS)
    training = made.context.training
    contexts = {
        kind: replace(made.context, training=training.model_copy(update={"precision": kind}), built={})
        for kind in KINDS
    }
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    losses = {}
    for _ in range(TURNS + 1):
        for kind, context in contexts.items():
            began = time.process_time()
            losses[kind] = perform(context, made.method, message, share).loss or 0.0
            times[kind].append(1000 * (time.process_time() - began) / STEPS)
    least = {kind: min(own[1:]) for kind, own in times.items()}
    rest = {"ratio": least["bf16"] / least["float32"], "loss": abs(losses["bf16"] / losses["float32"] - 1)}
    return {name: float(f"{value:.3g}") for name, value in (least | rest).items()}


def table(found: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = ["| network | float32, ms | bf16, ms | bf16 of float32 |", "| --- | ---: | ---: | ---: |"]
    for name, row in found["networks"].items():
        lines.append(f"| {name} | {row['float32']:.2f} | {row['bf16']:.2f} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measures every network and writes it down."""
    from steps import NETWORKS

    precision("bf16", torch.device("cpu"))  # an error where this processor has no units for it
    NETWORKS.update(LARGER)
    hold_memory()
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    found: dict[str, Any] = {"machine": machine, "networks": {}}
    with one_thread():
        for network in NETWORKS:
            found["networks"][network] = measured(network)
            print(network, found["networks"][network], flush=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main()
