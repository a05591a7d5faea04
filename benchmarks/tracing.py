"""What tracing takes: CPU seconds, and memory above that of the process with the weights loaded.

    python benchmarks/tracing.py            # every network in a process of its own; writes benchmarks/tracing.json

The first trace of a process also loads what PyTorch loads late; it is part of what is measured. Memory is the peak of
the process (`VmHWM`, reset before the trace), so Linux is needed; the networks are those of pytorchcv and transformers.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anysize as az
from anysize.config.packages import load, load_torchvision

OUT = Path(__file__).parent / "tracing.json"


class Asked(nn.Module):
    """A network of transformers that returns its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, symbols: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=symbols).logits
        return logits


def resnet() -> tuple[nn.Module, Tensor]:
    load_torchvision()
    from pytorchcv.model_provider import get_model

    return get_model("resnet50"), torch.zeros(2, 3, 224, 224)


def bert() -> tuple[nn.Module, Tensor]:
    transformers = load("transformers", "the benchmark")
    network = transformers.BertForSequenceClassification(transformers.BertConfig())
    return Asked(network), torch.ones(2, 128, dtype=torch.long)


def gpt() -> tuple[nn.Module, Tensor]:
    transformers = load("transformers", "the benchmark")
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    return Asked(network), torch.ones(2, 128, dtype=torch.long)


def wide() -> tuple[nn.Module, Tensor]:
    layers = [part for _ in range(4) for part in (nn.Linear(5000, 5000), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(5000, 10)), torch.zeros(2, 5000)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "ResNet-50": resnet,
    "BERT-base": bert,
    "GPT-2 small": gpt,
    "4 layers of 5000 x 5000": wide,
}


def peak_bytes() -> int:
    """The most memory that the process has had since the peak was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measured(name: str) -> dict[str, Any]:
    """The cost of one trace, in this process."""
    network, example = NETWORKS[name]()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    Path("/proc/self/clear_refs").write_text("5")
    before, began = peak_bytes(), time.process_time()
    axes = az.trace(network, example)
    return {
        "network": name,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "groups": len(axes.groups),
        "cpu_s": round(time.process_time() - began, 2),
        "extra_mb": round((peak_bytes() - before) / 1e6, 1),
        "weights_mb": round(weights / 1e6, 1),
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1])))
        return
    command = [sys.executable, __file__]
    rows = [json.loads(subprocess.check_output([*command, name]).splitlines()[-1]) for name in NETWORKS]
    environment = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    OUT.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")
    for row in rows:
        print("{network}: {cpu_s} s, {extra_mb} MB beside {weights_mb} MB of weights".format(**row))


if __name__ == "__main__":
    main()
