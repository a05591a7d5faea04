"""Trains a network of your own across devices of four sizes; nothing in it knows about widths.

python examples/train_any_module.py [--rounds 10] [--out runs/any-module]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import anysize as az


class Residual(nn.Module):
    """A stem, one residual block, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.first = nn.Conv2d(32, 48, 3, padding=1)
        self.norm = nn.BatchNorm2d(48)
        self.second = nn.Conv2d(48, 32, 3, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.stem(x).relu(), 2)
        x = x + self.second(self.norm(self.first(x)).relu())
        return self.head(x.relu().mean((2, 3)))


def digits() -> az.Data:
    """Your own arrays: images as bytes, classes as integers."""
    bundle = load_digits()
    x = torch.tensor(bundle.images * 255 / 16).to(torch.uint8)  # (1797, 8, 8)
    y = torch.tensor(bundle.target)
    test = torch.arange(len(y)) % 5 == 0
    return az.Data(train=(x[~test], y[~test]), test=(x[test], y[test]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/any-module"))
    options = parser.parse_args()

    torch.manual_seed(0)  # a live network is where training starts: its weights are yours to draw
    network = Residual()
    print(az.trace(network, torch.zeros(2, 1, 8, 8)), "\n")

    experiment = az.Experiment(
        data=digits(),
        clients=10,
        partition={"split": "dirichlet", "alpha": 1.0},
        model=network,
        method="heterofl",
        devices={"capacities": [0.25, 0.5, 0.75, 1.0]},
        training={"local_epochs": 2, "batch_size": 16, "learning_rate": 0.05},
        rounds=options.rounds,
    )
    run = experiment.run(out=options.out, overwrite=True)
    for label, metrics in run.evaluate().items():
        small = run.customize(label)
        parameters = sum(parameter.numel() for parameter in small.parameters())
        print(f"width {label}: {parameters:,} parameters, accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
