"""Which channels a PriSM client should compute: accuracy of the finished networks on held-out data and on test data.

    python experiments/prism/channels.py digits 0 1 2 > experiments/prism/results/channels-digits.csv

The arguments are a setting, seeds and, if not all are wanted, choices of channels. Choose by the column `held_out`
(clients' own held-out samples) alone. Both columns normalise by batches of 500, as the paper tests; `train_macs` and
`parameters` are a client's cost.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import anysize as az
from anysize.client.process import one_thread
from anysize.data import Part, to_input
from anysize.elastic.norm import without_statistics
from anysize.experiment.experiment import evaluation_part
from anysize.runs.experiment import Experiment

HERE = Path(__file__).parent
SHORT = ["data.fraction=0.25", "data.validation=0.2", "rounds=20", "evaluate_every=20"]
SKEWED = ["data.split=dirichlet", "data.alpha=0.1"]
SETTINGS = {
    "digits": ("digits.toml", []),
    "digits-skewed": ("digits.toml", SKEWED),
    "fashion-mnist": ("fashion-mnist.toml", SHORT),
    "fashion-mnist-skewed": ("fashion-mnist.toml", SHORT + SKEWED),
}
QUICK = ["engine.name=inprocess", 'evaluation={on=["clients"],clients=1,calibration_clients=1}']
CHOICES = {
    "windows": ["method.channels=windows"],
    "first, zero": ["method.channels=first", "method.dropped=zero"],
    "first, kept": ["method.channels=first", "method.dropped=kept"],
    "drawn": ["method.channels=drawn"],
    "origdrop": ['method={name="origdrop"}'],
    "all": ["method.channels=all"],
}


def accuracy(network: nn.Module, parts: list[Part]) -> float:
    """In percent over all samples of the parts together, in a fixed random order, by the statistics of each batch."""
    pairs = [part.batch(torch.arange(len(part))) for part in parts]
    x, y = (torch.cat(own) for own in zip(*pairs))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    network = without_statistics(network).eval()
    with torch.no_grad():
        right = [hits(network, x[batch], y[batch]) for batch in order.split(500)]
    return 100 * sum(right) / len(y)


def hits(network: nn.Module, x: Tensor, y: Tensor) -> int:
    return int((network(to_input(x)).argmax(1) == y).sum())


def measured(setting: str, choice: str, seed: str) -> Iterator[str]:
    """A row for each size of one run: rounds, size, both accuracies, a client's cost, and seconds."""
    began = time.perf_counter()
    file, changes = SETTINGS[setting]
    config = az.config.load(HERE / file, [*changes, *CHOICES[choice], *QUICK, f"seed={seed}"])
    with tempfile.TemporaryDirectory() as folder, one_thread():
        run = az.run(Experiment.from_config(config), out=Path(folder) / "run", progress=False)
        made, shares = run.experiment, run.experiment.shares
        held = [shares.share(client).held_out for client in range(len(shares))]
        cost = run.cost(made.context.sizes[0])
        for size in run.sizes:
            network = made.method.customize(made.context, run.state, size)
            found = [accuracy(network, [p for p in held if p is not None]), accuracy(network, [evaluation_part(made)])]
            about = f"{cost.parameters},{cost.training_macs},{time.perf_counter() - began:.0f}"
            yield f"{run.round},{size.label},{found[0]:.1f},{found[1]:.1f},{about}"


def main(setting: str, more: list[str]) -> None:
    seeds = [word for word in more if word.isdigit()]
    choices = [word for word in more if not word.isdigit()] or list(CHOICES)
    command = shlex.join(["python", "experiments/prism/channels.py", setting, *more]).replace('"', '""')
    print("data,channels,seed,rounds,size,held_out,test,parameters,train_macs,seconds,command", flush=True)
    for seed in seeds:
        for choice in choices:
            for row in measured(setting, choice, seed):
                print(f'{setting},"{choice}",{seed},{row},"{command}"', flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
