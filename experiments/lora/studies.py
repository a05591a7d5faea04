"""Every merge beside FedAvg of the whole network: perplexity, bytes and memory of every size, over seeds.

    python experiments/lora/base.py
    python experiments/lora/studies.py tune > experiments/lora/results/tuning.csv
    python experiments/lora/studies.py 0 1 2 > experiments/lora/results/seeds.csv

`tune` runs every method at every learning rate with seed 0, and measures the clients' held-out texts alone. Seeds run
every method at the rate that was best there, and measure the test texts. More arguments: the methods that are wanted,
and `header=no`. Every row has a command that gives its run alone.
"""

from __future__ import annotations

import csv
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

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
TUNING = HERE / "results" / "tuning.csv"
BASE = "model.weights=base.safetensors"
LENGTH = ["rounds=20", "evaluate_every=20", "training.batch_size=8"]
WHOLE = ['method={name="fedavg"}', "devices.capacities=[1.0]"]
METHODS = {
    "none": [*WHOLE, "rounds=1"],  # the network as it came: its only rate is almost zero
    "fedavg": WHOLE,
    "rank 2 for all": ["method.merge=zero-padding", "devices.capacities=[0.125]"],
    **{merge: [f"method.merge={merge}"] for merge in ("zero-padding", "svd", "stacking", "basis", "sampled")},
}
RATES = {"none": ("1e-12",), "fedavg": ("3e-4", "1e-3", "3e-3")}
ADAPTERS = ("3e-3", "1e-2", "3e-2")
TUNED = "method,learning_rate,seed,rounds,held_out_perplexity,cpu_seconds,command"
MEASURED = (
    "method,learning_rate,seed,rounds,size,perplexity,accuracy,parameters,training_macs,activation_bytes,bytes_down,"
    "bytes_up,memory_bytes,cpu_seconds,command"
)


@contextmanager
def ran(method: str, rate: str, seed: str) -> Iterator[tuple[Any, float, str]]:
    """A finished run, its CPU seconds and the command that gives it."""
    more = [BASE, *LENGTH, *METHODS[method], f"training.learning_rate={rate}", f"seed={seed}", "engine.name=inprocess"]
    sets = " ".join(f"--set {shlex.quote(change)}" for change in more)
    command = f"python experiments/lora/base.py && anysize run {FILE} {sets}".replace('"', '""')
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder, one_thread():
        run = az.run(HERE / "shakespeare.toml", overrides=more, out=Path(folder) / "run", progress=False)
        yield run, time.process_time() - began, f'"{command}"'


def held_out(method: str, rate: str, seed: str) -> str:
    """A row of tuning: the mean of the clients' perplexity, each at its own size, after the last round."""
    with ran(method, rate, seed) as (run, seconds, command):
        groups = run.history[-1]["client_metrics"].values()
        mean = sum(group["mean"] * group["clients"] for group in groups) / sum(group["clients"] for group in groups)
        return f"{method},{rate},{seed},{run.round},{mean:.4f},{seconds:.0f},{command}"


def chosen(method: str) -> str:
    """The rate that was best on held-out texts."""
    with TUNING.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == method]
    return min(rows, key=lambda row: float(row["held_out_perplexity"]))["learning_rate"]


def sizes(method: str, seed: str) -> Iterator[str]:
    """A row for each size of one run at the chosen rate."""
    rate = chosen(method)
    with ran(method, rate, seed) as (run, seconds, command):
        experiment = run.experiment
        context = experiment.context
        test, used = experiment.data.test, set(experiment.config.data.domains)
        own = torch.tensor([place for place, group in enumerate(groups_of(test)) if group in used])
        for size in run.sizes:
            found = context.task.metrics(measure(context, run.customize(size.label), SubsetPart(test, own), 500))
            cost = run.cost(size)
            message = experiment.method.extract(context, run.state, Client(0, 0, size, 1, 32, 0))
            memory = message_cost(context.for_client(), experiment.method, message, experiment.example)["memory_bytes"]
            yield (
                f"{method},{rate},{seed},{run.round},{size.label},{found['perplexity']:.4f},{found['accuracy']:.4f},"
                f"{cost.parameters},{cost.training_macs},{cost.activation_bytes},{cost.bytes_down},{cost.bytes_up},"
                f"{memory:.0f},{seconds:.0f},{command}"
            )


def main(words: list[str]) -> None:
    seeds, tuning = [word for word in words if word.isdigit()], "tune" in words
    wanted = [word for word in words if word in METHODS] or list(METHODS)
    if "header=no" not in words:
        print(TUNED if tuning else MEASURED, flush=True)
    if tuning:
        for method in wanted:
            for rate in RATES.get(method, ADAPTERS):
                print(held_out(method, rate, "0"), flush=True)
    for seed, method in product(seeds, wanted):
        for row in sizes(method, seed):
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
