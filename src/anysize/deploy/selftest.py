"""`anysize join --measure`: measures what this device can train, and writes it into the device's file."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import httpx

from anysize import config as configs
from anysize.atomic import write
from anysize.deploy import device_file, own_data
from anysize.deploy.device_file import DeviceConfig
from anysize.deploy.folder import EXPERIMENT
from anysize.deploy.footprint import FOOTPRINTS, peak_bytes, written
from anysize.deploy.superlink import SPEED, SPEED_BYTES
from anysize.deploy.timing import LATENCIES, Measurement, every_latency, latency_rows, measure
from anysize.elastic.skeleton import weightless
from anysize.errors import ConfigError
from anysize.experiment.experiment import Experiment
from anysize.experiment.lookup import step_timed
from anysize.experiment.sizes import sized
from anysize.methods.size import Size

_SPEED_SECONDS = 60.0

Say = Callable[[str], None]


def measured(file: Path, *, insecure: bool = False, say: Say = print) -> Measurement:
    """Measure this machine for the experiment beside a device's file, and write the capacity into the file.

    A round may take as long as the experiment's `engine.round_timeout`, training and messages together. If a budget
    limits `latency_ms`, the time of every size that it could choose is written beside the file. A budget of the device
    itself that limits it or `memory_bytes` stays, in place of a capacity.

    The memory of every size is measured in a process of its own, and written beside the file too.
    """
    device = device_file.load(file)
    beside = device.path(EXPERIMENT)
    config = configs.load(beside)
    with weightless():
        experiment = Experiment.from_config(config)
        samples = len(own_data.own_share(device, config, experiment.signature).train)
        speed = bytes_per_second(device, insecure, say)
        limit = config.engine.round_timeout
        found = measure(
            experiment,
            samples=samples,
            bytes_per_second=speed,
            seconds=limit,
            memory_bytes=device.memory_bytes,
            peak=partial(peak_bytes, file),
        )
        taken = _note_memory(experiment, device, found, say)
        budget = device.limits.budget
        timely, own = (False, False) if budget is None else (bool(budget.latency_ms), bool(budget.memory_bytes))
        if timely or any(group.budget is not None and group.budget.latency_ms for group in config.devices.groups):
            _note_latencies(experiment, device, [size for size, most in taken.items() if math.isinf(most)], say)
    for line in described(found, speed):
        say(line)
    if timely or own:
        return found
    if found.capacity is None:
        raise ConfigError(f"this device cannot train even the smallest size of {beside} in time and memory")
    chosen = device.model_copy(update={"capacity": found.capacity, "budget": None})
    write(file, device_file.dumps(chosen).encode(), ConfigError, f"enter capacity = {found.capacity:g} by hand")
    say(f"{file}: capacity = {found.capacity:g}")
    return found


def _note_latencies(experiment: Experiment, device: DeviceConfig, without: Collection[Size], say: Say) -> None:
    """Time every size that a budget could choose but those, and write the file that the device and its group read."""
    path, times = device.path(LATENCIES), every_latency(experiment, device.memory_bytes, without)
    if not times:
        raise ConfigError("this device has too little memory for any size of the experiment")
    write(path, latency_rows(times, step_timed(experiment)).encode(), ConfigError)
    say(f"{path}: {len(times)} sizes, {min(times.values()):.1f} to {max(times.values()):.1f} ms a step")


def _note_memory(experiment: Experiment, device: DeviceConfig, found: Measurement, say: Say) -> dict[Size, float]:
    """What the training of the sizes took in memory, written for the device and what it tells its server."""
    taken = {
        sized(experiment.method, experiment.context_for(()), timing.capacity): timing.peak_bytes
        for timing in found.timings
        if timing.peak_bytes is not None
    }
    if not taken:
        say("this system does not tell how much memory a process took; it is predicted")
        return taken
    path = device.path(FOOTPRINTS)
    write(path, written(step_timed(experiment), taken), ConfigError)
    amounts = [most / 1e6 for most in taken.values() if math.isfinite(most)]
    span = f", {min(amounts):.0f} to {max(amounts):.0f} MB" if amounts else ""
    failed = len(taken) - len(amounts)
    say(f"{path}: the memory of {len(taken)} sizes{span}{f'; {failed} ran out of it' if failed else ''}")
    return taken


def bytes_per_second(device: DeviceConfig, insecure: bool, say: Say) -> float | None:
    """The bandwidth to the server and back; None, with a notice, if the server does not answer."""
    scheme = "http" if insecure else "https"
    trusted = True if insecure else ssl.create_default_context(cafile=device.path(device.certificate or ""))
    try:
        with httpx.Client(base_url=f"{scheme}://{device.server}", verify=trusted, timeout=_SPEED_SECONDS) as client:
            client.post(SPEED, content=b"").raise_for_status()  # the handshake is not counted
            began = time.perf_counter()
            client.post(SPEED, content=bytes(SPEED_BYTES)).raise_for_status()
            client.get(SPEED).raise_for_status()
            return 2 * SPEED_BYTES / (time.perf_counter() - began)
    except (httpx.HTTPError, OSError) as error:
        say(f"the server at {device.server} does not answer ({error}): messages are assumed to take no time")
        return None


def described(found: Measurement, speed: float | None) -> list[str]:
    """The measurements, a line for each size."""
    memory = "unknown" if found.memory_bytes is None else f"{found.memory_bytes / 1e6:.0f} MB"
    rate = "unknown" if speed is None else f"{speed / 1e6:.1f} MB/s"
    lines = [f"free memory {memory}, to and from the server {rate}"]
    for timing in found.timings:
        if timing.peak_bytes == math.inf:
            lines.append(f"  capacity {timing.capacity:g}: ran out of memory")
            continue
        needs = f"{(timing.peak_bytes or timing.memory_bytes) / 1e6:.1f} MB"
        if timing.step_seconds is None or timing.round_seconds is None:
            lines.append(f"  capacity {timing.capacity:g}: needs {needs}; not tried")
            continue
        took = f"{1000 * timing.step_seconds:.1f} ms a step, {timing.round_seconds:.1f} s a round"
        lines.append(f"  capacity {timing.capacity:g}: {took}, {needs}{'' if timing.fits else ': too slow'}")
    return lines
