"""What a device can train, measured on it."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anysize.client.accelerators import place
from anysize.config import files as config_files
from anysize.config.latencies import COLUMNS, LatenciesConfig
from anysize.cost.count import training_cost
from anysize.cost.latency import blank, step_seconds
from anysize.cost.memory import available_bytes
from anysize.deploy.affordable import Costs
from anysize.devices.groups import Latencies
from anysize.elastic.fast import layout
from anysize.elastic.skeleton import fill, hollow, named_tensors
from anysize.errors import ConfigError
from anysize.experiment.experiment import Experiment
from anysize.experiment.sizes import choices_of, sized
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import SubModel
from anysize.methods.size import Size
from anysize.methods.training import Batch
from anysize.wire import Json

log = logging.getLogger("anysize")

LATENCIES = "latency.csv"
"""The file beside a device's own that says how long sizes take on it."""
_MARGIN = 0.8  # of the free memory that training may use: other processes need some too
_CAPACITIES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Timing:
    """One size on this machine.

    Attributes:
        label: the size's label.
        capacity: the capacity that trains this size.
        memory_bytes: the memory that training takes, as counted from its tensors.
        peak_bytes: what a process took at its peak above an idle one; infinite if it ran out of memory, None if it was
            not measured.
        step_seconds: of one training step; None if it was not tried, for lack of memory.
        macs_per_second: multiply-adds of training per second; None if it was not tried.
        round_seconds: the time of a round's steps and messages; None if it was not tried.
        fits: whether memory and time allow it.
    """

    label: str
    capacity: float
    memory_bytes: int
    peak_bytes: float | None = None
    step_seconds: float | None = None
    macs_per_second: float | None = None
    round_seconds: float | None = None
    fits: bool = False


@dataclass(frozen=True)
class Measurement:
    """What a machine can do for an experiment.

    Attributes:
        memory_bytes: how much memory was free or allowed; None if unknown.
        timings: one for each size, smallest first.
    """

    memory_bytes: float | None
    timings: tuple[Timing, ...]

    @property
    def capacity(self) -> float | None:
        """The largest capacity such that it and every smaller one fit; None if not even the smallest does."""
        found = None
        for timing in self.timings:
            if not timing.fits:
                break
            found = timing.capacity
        return found

    def to_json(self) -> Json:
        """As JSON."""
        return {"capacity": self.capacity, **asdict(self)}


def measure(
    experiment: Experiment,
    *,
    samples: int,
    bytes_per_second: float | None = None,
    seconds: float | None = None,
    memory_bytes: float | None = None,
    peak: Callable[[float], float | None] = lambda capacity: None,
) -> Measurement:
    """Time a training step of each size that the experiment trains and memory allows.

    What is measured of memory counts before what is predicted. A size that is predicted not to fit is not tried.

    Args:
        experiment: whose method, model, task and training count.
        samples: how many this device trains on in an epoch.
        bytes_per_second: to and from the server; None: messages take no time.
        seconds: how long a round may take; None: any time.
        memory_bytes: that may be used; by default what is free.
        peak: measures the memory that training the size of a capacity takes; None if it cannot, infinite if there is
            too little. Such a size does not fit; the others are measured.
    """
    free = available_bytes() if memory_bytes is None else memory_bytes
    usable = math.inf if free is None else _MARGIN * free
    capacities = sorted({group.capacity for group in experiment.config.devices.groups if group.capacity is not None})
    listed = tuple(sorted(experiment.config.devices.capacities or ())) or tuple(capacities) or _CAPACITIES
    sizes = {c: sized(experiment.method, experiment.context_for(()), c) for c in listed}
    context, method = experiment.context_for(tuple(sizes.values())).for_client(), experiment.method
    costs = Costs(context, method, experiment.example)
    timings: list[Timing] = []
    for capacity, size in sizes.items():
        message = costs.message(size, "train")
        timing = Timing(size.label, capacity, int(costs.of(message)["memory_bytes"]))
        if timing.memory_bytes <= usable:
            timing = replace(timing, peak_bytes=peak(capacity))
        needed = timing.peak_bytes or timing.memory_bytes
        if needed <= usable and math.isfinite(needed):
            timing = _timed(experiment, context, message, timing, samples, bytes_per_second, seconds)
        timings.append(timing)
    if not timings:
        raise ConfigError("the experiment trains no sizes that can be measured")
    return Measurement(free, tuple(timings))


def _timed(
    experiment: Experiment,
    context: Context,
    message: SubModel,
    timing: Timing,
    samples: int,
    bytes_per_second: float | None,
    seconds: float | None,
) -> Timing:
    """The timing with what trying found."""
    method, example, training = experiment.method, experiment.example, context.training
    cost = training_cost(context, method, message, example)
    step = step_seconds(context, method, trainable(context, method, message), blank(example, context.device))
    per_epoch = math.ceil(samples / training.batch_size)
    steps = training.local_steps or per_epoch * (training.local_epochs or 1)
    traffic = cost["bytes_down"] + cost["bytes_up"]
    took = steps * step + (traffic / bytes_per_second if bytes_per_second else 0.0)
    return replace(
        timing,
        step_seconds=step,
        macs_per_second=cost["training_macs"] * len(example.x) / step,
        round_seconds=took,
        fits=seconds is None or took <= seconds,
    )


def own_latency(
    context: Context, method: Method[Any], example: Batch, memory_bytes: float | None = None
) -> Callable[[Size], float]:
    """A function that times a training step of a size on this machine, in milliseconds; every size once.

    A size for which memory does not suffice is never made: its time is infinite.
    """
    costs, found = Costs(context, method, example), dict[Size, float]()

    def latency(size: Size) -> float:
        if size not in found:
            found[size] = timed(costs.message(size, "train"))
        return found[size]

    def timed(message: SubModel) -> float:
        free = available_bytes() if memory_bytes is None else memory_bytes
        if free is not None and costs.of(message)["memory_bytes"] > _MARGIN * free:
            return math.inf
        module = trainable(context, method, message)
        return 1000 * step_seconds(context, method, module, blank(example, context.device))

    return latency


def every_latency(
    experiment: Experiment, memory_bytes: float | None = None, without: Collection[Size] = ()
) -> dict[Size, float]:
    """The milliseconds of a training step of every size that a budget could choose and memory allows, smallest first.

    They are timed without masks, since a dense multiplication by zero takes as long.

    Args:
        experiment: whose sizes.
        memory_bytes: that may be used; by default what is free.
        without: sizes of which it is known that memory does not allow them.
    """
    method = experiment.method
    choices = {replace(size, mask=0.0) for size in choices_of(method, experiment.context_for(()))} - set(without)
    found = {}
    for size in sorted(choices, key=lambda size: size.order):
        context = experiment.context_for((size,)).for_client()
        found[size] = own_latency(context, method, experiment.example, memory_bytes)(size)
    return {size: time for size, time in found.items() if math.isfinite(time)}


def noted_latency(path: Path, step: Json, otherwise: Callable[[Size], float]) -> Callable[[Size], float]:
    """The milliseconds of a size as the file says that `anysize join --measure` wrote.

    Args:
        path: the file; it need not exist.
        step: what the experiment's training step depends on; a file about another step does not count.
        otherwise: for sizes of which the file says nothing.
    """
    if not path.is_file():
        return otherwise
    times = Latencies.of(config_files.checked(LatenciesConfig, path.name, str(path), folder=path.parent))
    if any(getattr(times, what) != value for what, value in step.items()):
        log.warning("%s is about another training step; sizes are timed again", path)
        return otherwise

    def latency(size: Size) -> float:
        noted = times.at(size.width, size.depth)
        return noted if math.isfinite(noted) else otherwise(size)

    return latency


def latency_rows(times: Mapping[Size, float], step: Json) -> str:
    """The times of sizes as CSV, for `latencies` of a device group."""
    stream = io.StringIO()
    rows = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    rows.writeheader()
    for size, time in times.items():
        rows.writerow({"width": size.width, "depth": size.depth, "latency_ms": round(time, 6), **step})
    return stream.getvalue()


def trainable(context: Context, method: Method[Any], message: SubModel) -> nn.Module:
    """The network that a client builds from a message without numbers, with small random numbers."""
    random = torch.Generator().manual_seed(0)

    def numbers(tensor: Tensor) -> Tensor:
        made = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return made.uniform_(0.0, 0.05, generator=random) if made.is_floating_point() else made

    skeleton = hollow(method.build(context, message))
    network = fill(skeleton, {name: numbers(tensor) for name, tensor in named_tensors(skeleton)})
    return place(layout(network), context.device)
