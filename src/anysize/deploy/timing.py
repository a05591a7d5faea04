"""What a device can train, measured on it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from anysize.client.accelerators import place
from anysize.client.objectives import make_objective
from anysize.client.optimizer import optimizer_of
from anysize.client.process import one_thread
from anysize.cost.count import own_bytes, training_step
from anysize.cost.memory import available_bytes, training_bytes
from anysize.elastic.fast import fast, layout
from anysize.elastic.skeleton import fill, named_tensors
from anysize.errors import ConfigError
from anysize.experiment.experiment import Experiment
from anysize.experiment.sizes import sized
from anysize.methods.context import Context
from anysize.methods.heterofl import HeteroFL
from anysize.methods.messages import ParameterGroup
from anysize.methods.size import Size
from anysize.methods.training import Batch
from anysize.wire import Json

_STEPS = 5  # timed, after one that warms up


_MARGIN = 0.8  # of the free memory that is counted on: others want some too


_CAPACITIES = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Timing:
    """One size on this machine.

    Attributes:
        label: of the size.
        capacity: of which it is the size.
        memory_bytes: what training it takes.
        step_seconds: of one training step; None if it was not tried, for lack of memory.
        macs_per_second: multiply-adds of training in a second; None if it was not tried.
        round_seconds: of a round's steps and messages; None if it was not tried.
        fits: whether memory and time allow it.
    """

    label: str
    capacity: float
    memory_bytes: int
    step_seconds: float | None
    macs_per_second: float | None
    round_seconds: float | None
    fits: bool


@dataclass(frozen=True)
class Measurement:
    """What a machine can do for an experiment.

    Attributes:
        memory_bytes: how much memory was free; None if that cannot be found out.
        timings: of each size, smallest first.
    """

    memory_bytes: int | None
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
    memory_bytes: int | None = None,
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> Measurement:
    """Times a training step of each size that the experiment trains, as long as memory allows.

    Args:
        experiment: of which the model, the task and the training count.
        samples: how many this device trains on in an epoch.
        bytes_per_second: to and from the server; None: messages take no time.
        seconds: how long a round may take; None: any time.
        memory_bytes: that may be used; by default what is free.
        costs: of the method, by the labels of sizes, as `anysize plan` gives them; without, those of ordinary networks.
    """
    free = available_bytes() if memory_bytes is None else memory_bytes
    capacities = sorted({group.capacity for group in experiment.config.devices.groups if group.capacity is not None})
    listed = tuple(sorted(experiment.config.devices.capacities or ())) or tuple(capacities) or _CAPACITIES
    sizes = {c: sized(experiment.method, experiment.context_for(()), c) for c in listed}
    context = experiment.context_for(tuple(sizes.values()))
    timings: list[Timing] = []
    for capacity, size in sizes.items():
        own = (costs or {}).get(size.label)
        timing = _timed(context, size, capacity, experiment.example, free, own, samples, bytes_per_second)
        late = seconds is not None and (timing.round_seconds is None or timing.round_seconds > seconds)
        timings.append(Timing(**(asdict(timing) | {"fits": timing.fits and not late})))
    if not timings:
        raise ConfigError("the experiment trains no sizes that can be measured")
    return Measurement(free, tuple(timings))


def _timed(
    context: Context,
    size: Size,
    capacity: float,
    example: Batch,
    free: int | None,
    costs: Mapping[str, float] | None,
    samples: int,
    bytes_per_second: float | None,
) -> Timing:
    skeleton = context.skeleton(size.width, size.depth)
    macs, held = training_step(context, HeteroFL(), layout(_copy(skeleton, "meta")), _batch(example, "meta"))
    parameters, traffic = own_bytes(skeleton), 2 * own_bytes(skeleton)
    scale = 1.0
    if costs is not None:
        scale = costs["training_macs"] * len(example.x) / max(macs, 1)
        held, traffic = int(costs["activation_bytes"]), int(costs["bytes"])
        parameters = max(parameters, 4 * int(costs["parameters"]))
    needed = training_bytes(context.training, parameters, held)
    if free is not None and needed > _MARGIN * free:
        return Timing(size.label, capacity, needed, None, None, None, fits=False)
    plain = step_seconds(context, place(_copy(skeleton, "cpu"), context.device), _batch(example, context.device))
    step = plain * scale
    training = context.training
    per_epoch = math.ceil(samples / training.batch_size)
    steps = training.local_steps or per_epoch * (training.local_epochs or 1)
    took = steps * step + (traffic / bytes_per_second if bytes_per_second else 0.0)
    return Timing(size.label, capacity, needed, step, macs / plain, took, fits=True)


def step_seconds(context: Context, network: nn.Module, batch: Batch) -> float:
    """The median time of an ordinary training step with one thread."""
    network = layout(network).train()
    objective = make_objective(context.task, context.tricks, None, classifier=context.axes.classifier)
    trained = [ParameterGroup([p for p in network.parameters() if p.requires_grad])]
    optimizer = optimizer_of(context.training, trained, 1e-6)
    times = []
    with one_thread():
        for _ in range(_STEPS + 1):
            began = time.perf_counter()
            loss = objective(network, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _copy(skeleton: nn.Module, device: str) -> nn.Module:
    """A network of the skeleton's structure with small random numbers."""
    random = torch.Generator().manual_seed(0)

    def numbers(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if device == "meta" or not tensor.is_floating_point():
            return made if device == "meta" else made.zero_()
        return made.uniform_(0.0, 0.05, generator=random)

    return fill(skeleton, {name: numbers(tensor) for name, tensor in named_tensors(skeleton)})


def _batch(example: Batch, device: str | torch.device) -> Batch:
    return Batch(fast(torch.zeros_like(example.x, device=device)), torch.zeros_like(example.y, device=device))
