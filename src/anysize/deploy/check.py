"""What a device finds out before it takes part: whether its code, its data and its limits fit the experiment."""

from __future__ import annotations

from pathlib import Path

from anysize import config as configs
from anysize.deploy import device_file, own_data
from anysize.deploy.affordable import Costs
from anysize.deploy.device_file import DeviceConfig
from anysize.deploy.folder import EXPERIMENT
from anysize.deploy.footprint import FOOTPRINTS, noted
from anysize.deploy.gate import accepted, refuse_upper_bounds
from anysize.elastic.skeleton import weightless
from anysize.errors import AnysizeError, ConfigError, told
from anysize.experiment.experiment import Experiment
from anysize.experiment.lookup import step_timed


def checked(file: Path) -> str:
    """What the device has and can train, in words, after everything was tried once.

    The experiment is the copy beside the device's file; without one, only the data is loaded.

    Raises:
        ConfigError: the device could not take part; says why and what to do.
    """
    device = device_file.load(file)
    device_file.check_limits(device)
    beside = device.path(EXPERIMENT)
    try:
        return _against(device, beside) if beside.is_file() else _alone(device)
    except (Exception, SystemExit) as error:  # a user's module may end the process when it is imported
        why = str(error) if isinstance(error, AnysizeError) else told(error)
        place = f"\nChecked against {beside}; if the server has another experiment by now, copy it there"
        advice = place if beside.is_file() else ""
        raise ConfigError(f"device '{device.name}' could not take part: {why}{advice}") from error


def tried(file: Path) -> list[str]:
    """What the user should know before a fleet is laid out for an experiment file: the notices of a plan.

    Raises:
        AnysizeError: the experiment cannot run on a fleet, for a reason that shows without its data.
    """
    experiment = Experiment.from_config(configs.load(file))
    experiment.tabulates = False  # that takes data
    refuse_upper_bounds(experiment.method)
    experiment.check_options()
    with weightless(), experiment.blamed("the trial of the experiment"):
        return experiment.notices()


def _against(device: DeviceConfig, beside: Path) -> str:
    config = accepted(beside.read_text(encoding="utf-8"), device)
    experiment = Experiment.from_config(config)
    refuse_upper_bounds(experiment.method)
    with weightless():
        context = experiment.context.for_client()
        share = own_data.own_share(device, config, experiment.signature)
        footprint = noted(device.path(FOOTPRINTS), step_timed(experiment))
        known = (context, experiment.method, experiment.example, config.devices.capacity_of)
        costs = Costs(*known, footprint=footprint)
        fitting = list(costs.allowed(device.limits, context.sizes, latency=lambda size: 0.0))
    if not fitting:
        sizes, least = ", ".join(size.label for size in context.sizes), costs.least(device.limits, context.sizes)
        raise ConfigError(f"its {device.limits} allows none of the sizes {sizes}{least}")
    held = 0 if share.held_out is None else len(share.held_out)
    return f"{device.name}: {len(share.train)} samples to train, {held} held out; can train size {fitting[-1].label}"


def _alone(device: DeviceConfig) -> str:
    count = len(own_data.loaded(device).train)
    return f"{device.name}: {count} samples; there is no {EXPERIMENT} beside its file to check them against"
