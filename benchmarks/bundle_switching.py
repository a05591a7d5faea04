"""Bundles of Split-Mix: how large they are beside their tensors, and how long a switch takes, for docs/devices.md.

    python benchmarks/bundle_switching.py DIR         # makes the bundles in DIR if they are not there, and prints

The network is the paper's for digits, eight bases of width 1/8 in four sizes, with one batch-norm each and with two.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import anysize as az
from anysize import runtime
from anysize.methods import SplitMix

SWITCHES = 400


def made(folder: Path, side: int, dual: bool) -> Path:
    """The bundle of a run of one step, which has the size and the structure of a finished one's."""
    path = folder / f"digits-{side}-{'two' if dual else 'one'}.anysize"
    if path.exists():
        return path
    x, y = torch.rand(40, 3, side, side, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 10
    run = az.Experiment(
        data=az.Data(train=(x, y), test=(x, y)),
        clients=4,
        model="digits-cnn",
        method=SplitMix(dual_norm=dual),
        devices={"capacities": [0.125, 0.25, 0.5, 1.0]},
        tricks={"batch_norm": "tracked", "adversarial": 0.5} if dual else {},
        training={"local_steps": 1},
        engine={"name": "inprocess"},
        rounds=1,
    ).run(folder / path.stem)
    return run.bundle(path).path


def tensor_bytes(path: Path) -> int:
    """The bytes of a bundle that are tensors of the networks."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    first, last = json.loads(content[8:start])["note"]["data_offsets"]
    return len(content) - start - (last - first)


def microseconds(switch: Callable[[int], object]) -> float:
    """The median time of a switch."""
    seconds = []
    for turn in range(SWITCHES):
        began = time.perf_counter()
        switch(turn)
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds) * 1e6, 1)


def measured(path: Path, side: int) -> dict[str, Any]:
    """The size of a bundle, and its times: to a size and to a level in memory, and to a level never used before."""
    network = runtime.load(path)
    sizes = network.sizes
    for size in sizes:
        network.switch(size)(torch.rand(1, 3, side, side))
    file, tensors = path.stat().st_size, tensor_bytes(path)
    found: dict[str, Any] = {"bundle": path.stem, "bytes": file, "over_tensors": round(file / tensors - 1, 4)}
    found["size_us"] = microseconds(lambda turn: network.switch(sizes[turn % 4]))
    if network.levels:
        for size in sizes:
            network.switch(size, robustness=1.0).switch(size, robustness=0.0)
        found["level_us"] = microseconds(lambda turn: network.switch(sizes[-1], robustness=float(turn % 2)))
        found["new_level_us"] = microseconds(lambda turn: network.switch(sizes[-1], robustness=(turn + 0.5) / SWITCHES))
    return found


def main() -> None:
    """Makes what is not there, measures and prints."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for side in (14, 28):
        for dual in (False, True):
            print(json.dumps(measured(made(folder, side, dual), side)), flush=True)


if __name__ == "__main__":
    main()
