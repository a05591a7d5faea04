"""Every merge beside FedAvg of the whole network: perplexity, bytes and memory of every size, over seeds.

    python experiments/lora/base.py
    python experiments/lora/studies.py 0 1 2 > experiments/lora/results/shakespeare.csv

The arguments are seeds and, if not all are wanted, methods and learning rates. Every row has a command that gives its
run alone.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

import anysize as az
from anysize.client.metrics import measure
from anysize.client.process import one_thread
from anysize.data import SubsetPart
from anysize.data.parts import groups_of
from anysize.deploy.affordable import message_cost
from anysize.methods.messages import Client

HERE = Path(__file__).parent
FILE = "experiments/lora/shakespeare.toml"
BASE = "model.weights=base.safetensors"
MERGES = ("zero-padding", "svd", "stacking", "basis", "sampled")
RATES = ("1e-3", "3e-3", "1e-2")
WHOLE = ['method={name="fedavg"}', "devices.capacities=[1.0]"]
METHODS = {
    "none": [*WHOLE, "rounds=1"],  # the network as it came: its only rate is almost zero
    "fedavg": WHOLE,
    **{merge: [f"method.merge={merge}"] for merge in MERGES},
}


def rows(method: str, rate: str, seed: str) -> Iterator[str]:
    """A row for each size of one run."""
    more = [BASE, *METHODS[method], f"training.learning_rate={rate}", f"seed={seed}", "engine.name=inprocess"]
    sets = " ".join(f"--set {shlex.quote(change)}" for change in more)
    command = f"python experiments/lora/base.py && anysize run {FILE} {sets}".replace('"', '""')
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, one_thread():
        run = az.run(HERE / "shakespeare.toml", overrides=more, out=Path(folder) / "run", progress=False)
        experiment = run.experiment
        context = experiment.context
        test, used = experiment.data.test, set(experiment.config.data.domains)
        own = torch.tensor([place for place, group in enumerate(groups_of(test)) if group in used])
        seconds = time.process_time() - began
        for size in run.sizes:
            found = context.task.metrics(measure(context, run.customize(size.label), SubsetPart(test, own), 500))
            cost = run.cost(size)
            message = experiment.method.extract(context, run.state, Client(0, 0, size, 1, 32, 0))
            memory = message_cost(context.for_client(), experiment.method, message, experiment.example)["memory_bytes"]
            yield (
                f"{method},{rate},{seed},{run.round},{size.label},{found['perplexity']:.4f},{found['accuracy']:.4f},"
                f"{cost.parameters},{cost.training_macs},{cost.activation_bytes},{cost.bytes_down},{cost.bytes_up},"
                f'{memory:.0f},{seconds:.0f},"{command}"'
            )


def main(words: list[str]) -> None:
    seeds = [word for word in words if word.isdigit()]
    wanted = [word for word in words if word in METHODS] or list(METHODS)
    rates = [word for word in words if word in RATES] or list(RATES)
    print(
        "method,learning_rate,seed,rounds,size,perplexity,accuracy,parameters,training_macs,activation_bytes,bytes_down,bytes_up,"
        "memory_bytes,cpu_seconds,command",
        flush=True,
    )
    for seed, method in product(seeds, wanted):
        for rate in ["1e-12"] if method == "none" else rates:
            for row in rows(method, rate, seed):
                print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
