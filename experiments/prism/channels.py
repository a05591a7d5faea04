"""Which channels a PriSM client should compute: accuracy of the finished networks on held-out data and on test data.

    python experiments/prism/channels.py digits 0 1 2 > experiments/prism/results/channels-digits.csv

The arguments are a setting and seeds. Choose by the column `held_out` (clients' own held-out samples) alone. Both
columns normalise by batches of 500, as the paper tests; `train_macs` and `parameters` are a client's cost.
"""

from __future__ import annotations

import sys
import tempfile
import time
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
SETTINGS = {
    "digits": ("digits.toml", []),
    "fashion-mnist": (
        "fashion-mnist.toml",
        ["data.fraction=0.25", "data.validation=0.2", "rounds=20", "evaluate_every=20"],
    ),
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


def main(setting: str, seeds: list[str]) -> None:
    file, changes = SETTINGS[setting]
    print("data,channels,seed,rounds,size,held_out,test,parameters,train_macs,seconds,command", flush=True)
    command = f"python experiments/prism/channels.py {setting} {' '.join(seeds)}"
    for seed in seeds:
        for name, options in CHOICES.items():
            began = time.perf_counter()
            more = [
                "engine.name=inprocess",
                f"seed={seed}",
                'evaluation={on=["clients"],clients=1,calibration_clients=1}',
            ]
            made = Experiment.from_config(az.config.load(HERE / file, [*changes, *options, *more]))
            with tempfile.TemporaryDirectory() as folder, one_thread():
                run = az.run(made, out=Path(folder) / "run", progress=False)
                shares = [run.experiment.shares.share(client) for client in range(len(run.experiment.shares))]
                held = [share.held_out for share in shares if share.held_out is not None]
                cost = run.cost(run.experiment.context.sizes[0])
                for size in run.sizes:
                    network = run.experiment.method.customize(run.experiment.context, run.state, size)
                    found = [accuracy(network, part) for part in (held, [evaluation_part(run.experiment)])]
                    about = f"{cost.parameters},{cost.training_macs},{time.perf_counter() - began:.0f}"
                    measured = f"{size.label},{found[0]:.1f},{found[1]:.1f}"
                    print(f'{setting},"{name}",{seed},{run.round},{measured},{about},{command}', flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
