"""Bundles for devices without PyTorch: how large they are beside their tensors, and how far outputs are from PyTorch's.

    python benchmarks/onnx_bundles.py         # writes benchmarks/onnx_bundles.json; --table prints it for the docs

Each is the bundle of a run of two steps, which has the size and the structure of a finished one's.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

OUT = Path(__file__).with_suffix(".json")
IMAGES = ([3, 32, 32], 10)
SMALL = ([1, 8, 8], 10)
OAT = {"name": "oat", "encoding": 8}
DUAL = {"name": "splitmix", "dual_norm": True}
BUNDLES: dict[str, tuple[str, Any, tuple[list[int], int]]] = {
    "`small-cnn`, HeteroFL": ("small-cnn", "heterofl", SMALL),
    "`small-cnn`, FLANC": ("small-cnn", "flanc", SMALL),
    "`small-cnn`, OAT": ("small-cnn", OAT, SMALL),
    "`small-cnn`, Split-Mix, robustness to choose": ("small-cnn", DUAL, SMALL),
    "`digits-cnn`, Split-Mix, robustness to choose": ("digits-cnn", DUAL, ([3, 28, 28], 10)),
    "`resnet18`, HeteroFL": ("resnet18", "heterofl", IMAGES),
    "`vit-tiny`, HeteroFL": ("vit-tiny", "heterofl", IMAGES),
    "`mlp`, FedHM": ("mlp", "fedhm", SMALL),
}


def measured(model: str, method: Any, about: tuple[list[int], int]) -> dict[str, float]:
    """The size of a bundle beside its tensors, and the largest difference of an output, over sizes and levels."""
    import anysize as az
    from anysize import onnx_runtime, runtime

    shape, classes = about
    x = torch.rand(40, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % classes
    dual = method is DUAL
    with tempfile.TemporaryDirectory() as home:
        run = az.Experiment(
            data=az.Data(train=(x, y), test=(x, y)),
            clients=4,
            model=model,
            method=method,
            devices={"capacities": [0.25, 0.5, 1.0]},
            tricks={"batch_norm": "tracked", "adversarial": 0.5} if dual else {},
            training={"local_steps": 2, "learning_rate": 0.01},
            engine={"name": "inprocess"},
            rounds=1,
        ).run(Path(home) / "run")
        file = run.bundle(Path(home) / "onnx.anysize", runtime="onnx").path
        plain = runtime.load(run.bundle(Path(home) / "torch.anysize").path)
        other = onnx_runtime.load(file)
        levels = sorted({*plain.levels, 0.3}) if dual else plain.levels or [None]
        off = [
            np.abs(other.switch(size, level)(x.numpy()) - plain.switch(size, level)(x).detach().numpy()).max()
            for size in plain.sizes
            for level in levels
        ]
        content = file.read_bytes()
    header = json.loads(content[8:][: int.from_bytes(content[:8], "little")])
    spans = [about["data_offsets"] for key, about in header.items() if key not in ("note", "__metadata__")]
    tensors = sum(last - first for first, last in spans)
    return {"bytes": len(content), "tensors": tensors, "difference": float(max(off)), "levels": len(plain.levels)}


def main() -> None:
    """Measure every bundle and write it down."""
    found: dict[str, Any] = {}
    for name, about in BUNDLES.items():
        found[name] = measured(*about)
        OUT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """The bundles as Markdown."""
    lines = [
        "| network, method | file | over its tensors | largest difference of an output |",
        "| --- " + "| ---: " * 3 + "|",
    ]
    for name, about in found.items():
        over = about["bytes"] / about["tensors"] - 1
        lines.append(f"| {name} | {about['bytes'] / 1e3:.0f} KB | +{over:.2%} | {about['difference']:.0e} |")
    return "\n".join(lines).replace("%", " %")


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main()
