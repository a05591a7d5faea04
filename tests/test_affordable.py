"""A device takes what its capacity or budget allows of every method, and nothing that costs more in any unit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import small
from anysize import config as configs
from anysize import methods
from anysize.client.process import one_thread
from anysize.deploy import gate as gates
from anysize.deploy.affordable import Costs, message_cost
from anysize.deploy.device_file import Limits
from anysize.deploy.gate import Gate, refuse_upper_bounds
from anysize.devices.budget import UNITS, Budget
from anysize.errors import TrustError
from anysize.experiment.brief import Brief, known_in
from anysize.methods.messages import Client, SubModel
from anysize.runs.experiment import Experiment
from anysize.wire import Json, dump

SIZES = (0.25, 0.5, 1.0)
TASKS = ("train", "calibrate", "evaluate")
ONE_NETWORK = ("fedavg", "oat")  # every client is sent the smallest


@pytest.fixture(autouse=True)
def _as_on_a_device() -> Iterator[None]:
    with one_thread():
        yield


@cache
def made(case: str, **changes: Any) -> Experiment:
    """A fleet's experiment; eLF's with masks is one whose server has data to prune with."""
    if case != "elf, masked":
        return Experiment.from_config(configs.from_dict(small.fleet_tables(case, SIZES) | changes))
    return small.experiment(
        method={"name": "elf", "sparsities": [0.5], "proxy": 0.2, "proxy_epochs": 1},
        model={"name": "resnet14", "options": {"channels": [4, 8]}},
        devices={"capacities": list(SIZES)},
    )


CASES = (*small.METHODS, "elf, masked")
FAST = ("heterofl", "fjord", "splitmix", "flanc", "prism, first channels", "fedhm", "elf, masked")
"""One of each kind: slices, drawn widths, bases, composed and factored kernels, depth with masks."""


@cache
def state(experiment: Experiment) -> Any:
    return experiment.method.init(experiment.context)


def message(experiment: Experiment, task: str, capacity: float) -> SubModel:
    """What the server sends to a device of a capacity."""
    size = experiment.size_of_group[repr(capacity)]
    client = Client(7, 0, size, 3, 10, experiment.config.seed, task)
    found = experiment.method.extract(experiment.context, state(experiment), client)
    return replace(found, ticket=replace(found.ticket, job=task, rate=0.05 if task == "train" else None))


@cache
def gate(experiment: Experiment, **limits: Any) -> Gate:
    known = (experiment.context.for_client(), experiment.method, experiment.example)
    return Gate(*known, Limits(**limits), experiment.config.devices.capacity_of)


def sent(sub_model: SubModel) -> tuple[bytes, Json]:
    return dump(sub_model.tensors, {}), json.loads(json.dumps(sub_model.ticket.to_json()))


def refused(door: Gate, sub_model: SubModel, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a message is refused; fails if it is not, or only after it was loaded."""
    with monkeypatch.context() as patch:
        patch.setattr(gates, "load", lambda blob: pytest.fail("it was loaded"))
        with pytest.raises(TrustError) as error:
            door(*sent(sub_model))
    return str(error.value)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("case", small.fast_if(FAST.__contains__, CASES))
def test_a_device_takes_its_own_size_and_every_smaller_one(case: str, task: str) -> None:
    experiment = made(case)
    for place, capacity in enumerate(SIZES):
        door = gate(experiment, capacity=capacity)
        for size in SIZES[: place + 1]:
            honest = message(experiment, task, size)
            assert dump(door(*sent(honest)).tensors, {}) == dump(honest.tensors, {})


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("case", small.fast_if(FAST.__contains__, [case for case in CASES if case not in ONE_NETWORK]))
def test_a_larger_network_is_refused_before_it_is_loaded_whatever_its_ticket_says(
    case: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = made(case)
    small_one, large_one = (message(experiment, task, size) for size in (0.25, 1.0))
    door = gate(experiment, capacity=0.25)
    for ticket in (large_one.ticket, replace(large_one.ticket, size="0.25"), small_one.ticket):
        hostile = replace(large_one, ticket=ticket)
        assert re.search("allows|does not build the network", refused(door, hostile, monkeypatch))
    assert "0.25, allows" in refused(door, large_one, monkeypatch)


@pytest.mark.parametrize("case", ONE_NETWORK)
def test_the_one_network_for_all_is_no_larger_than_the_smallest_device(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = small.fleet_tables(case, [1.0])
    alone = Experiment.from_config(configs.from_dict(tables))
    full = message(alone, "train", 1.0)
    door = gate(made(case), capacity=0.25)
    assert "does not build the network" in refused(door, full, monkeypatch)
    lie = Brief.of(alone).found() | {"sizes": [{"width": width} for width in (1.0, 0.25)]}  # the largest comes first
    context = replace(alone.context.for_client(), sizes=known_in(lie).sizes)
    turned = Gate(context, alone.method, alone.example, Limits(0.25))
    assert "does not build the network" in refused(turned, full, monkeypatch)


@pytest.mark.parametrize("case", ["fedhm", "prism, all channels"])
def test_kernels_that_a_ticket_does_not_mention_are_counted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their width is always 1: what makes a sub-model small is how many kernels it has."""
    experiment = made(case)
    honest = message(experiment, "train", 0.25)
    assert honest.width == 1.0
    name = next(name for name, tensor in honest.tensors.items() if name.startswith("left") and tensor.dim() == 4)
    other = name.replace("left", "right", 1)
    left, right = honest.tensors[name], honest.tensors[other]
    more = {name: torch.cat([left, left[:, :1]], 1), other: torch.cat([right, right[:1]])}
    hostile = replace(honest, tensors=honest.tensors | more)
    why = refused(gate(experiment, capacity=0.25), hostile, monkeypatch)
    extra = left[:, :1].numel() + right[:1].numel()  # the kernel's own numbers
    before = sum(tensor.numel() for tensor in honest.tensors.values())
    assert f"parameters = {before + extra}, and this device's capacity, 0.25, allows {before};" in why
    assert "training_macs" in why
    assert "activation_bytes" in why
    assert f"tensor_bytes = {2 * sum(4 * t.numel() for t in hostile.tensors.values())}" in why


@pytest.mark.parametrize(
    "task, unit",
    [("train", unit) for unit in ("parameters", "training_macs", "activation_bytes", "tensor_bytes")]
    + [(task, unit) for task in ("calibrate", "evaluate") for unit in ("macs", "inference_bytes", "tensor_bytes")],
)
def test_each_unit_alone_is_reason_enough(task: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = made("heterofl")
    door, honest = gate(experiment, capacity=0.5), message(experiment, task, 0.5)
    costs = door._costs.most(Limits(0.5), task)
    assert set(costs) >= {unit, "memory_bytes"}
    monkeypatch.setattr(Costs, "of", lambda self, sub_model: costs | {unit: costs[unit] + 1})
    why = refused(door, honest, monkeypatch)
    assert why.endswith(f"{unit} = {costs[unit] + 1:.0f}, and this device's capacity, 0.5, allows {costs[unit]:.0f}")
    assert why.count(", allows ") == 1


@pytest.mark.parametrize(
    "case, unit",
    small.fast_if(
        lambda case, unit: case == "heterofl" or unit == "training_macs",
        ["heterofl", "flanc", "splitmix", "prism, all channels", "elf"],
        UNITS,
    ),
)
def test_a_budget_in_any_unit_lets_through_what_fits_it_alone(
    case: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that a message does not show: what a training message costs in `macs` follows from its size."""
    experiment = made(case)
    limit, whole = (experiment.cost(experiment.size_of_group[name]).units()[unit] for name in ("0.5", "1.0"))
    door = gate(experiment, budget=Budget(**{unit: limit}))
    for task in TASKS:
        door(*sent(message(experiment, task, 0.5)))
        if limit == whole:  # kernels cost a finished network nothing
            door(*sent(message(experiment, task, 1.0)))
            continue
        assert f"budget, {unit} = {limit:g}, allows" in refused(door, message(experiment, task, 1.0), monkeypatch)
    none = gate(experiment, budget=Budget(**{unit: 1.0}))
    assert "allows none of the sizes" in refused(none, message(experiment, "train", 0.25), monkeypatch)


def test_a_budget_for_masked_weights_counts_those_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = made("elf, masked")
    limit = experiment.cost(experiment.size_of_group["0.5"]).parameters
    door = gate(experiment, budget=Budget(parameters=limit))
    door(*sent(message(experiment, "train", 0.5)))
    assert "parameters" in refused(door, message(experiment, "train", 1.0), monkeypatch)


@pytest.mark.parametrize(
    "case, unit",
    [("heterofl", unit) for unit in ("parameters", "macs", "activation_bytes", "bytes")]
    + [(case, "parameters") for case in ("flanc", "prism, all channels", "fedhm", "elf")],
)
def test_a_capacity_is_a_fraction_of_what_the_experiment_says(
    case: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = small.fleet_tables(case, [0.7, 1.0])
    tables["devices"] |= {"capacity_of": unit}
    experiment = Experiment.from_config(configs.from_dict(tables))
    part, whole = (experiment.cost(experiment.size_of_group[name]).units()[unit] for name in ("0.7", "1.0"))
    assert part <= 0.7 * whole
    door = gate(experiment, capacity=0.7)
    for task in TASKS:
        door(*sent(message(experiment, task, 0.7)))
        assert "capacity, 0.7, allows" in refused(door, message(experiment, task, 1.0), monkeypatch)


def test_a_size_that_costs_more_than_a_larger_one_is_still_within_its_capacity() -> None:
    """Factors can hold more than the weight that they make."""
    tables = small.fleet_tables("fedhm", [0.9, 1.0])
    experiment = Experiment.from_config(configs.from_dict(tables))
    costs = [experiment.cost(size).parameters for size in experiment.context.sizes]
    assert costs[0] > costs[1]
    for capacity in (0.9, 0.95, 1.0):
        gate(experiment, capacity=capacity)(*sent(message(experiment, "train", 0.9)))


@pytest.mark.parametrize("case", small.fast_if(FAST.__contains__, CASES))
def test_a_device_counts_without_weights_what_the_server_counts_with_them(case: str) -> None:
    experiment = made(case)
    costs = Costs(experiment.context.for_client(), experiment.method, experiment.example)
    for capacity in SIZES:
        size = experiment.size_of_group[repr(capacity)]
        counted, told = experiment.cost(size).units(), costs.units(size)
        assert {unit: told[unit] for unit in UNITS} == {unit: counted[unit] for unit in UNITS}
        known = (experiment.context.for_client(), experiment.method)
        real = message_cost(*known, message(experiment, "train", capacity), experiment.example)
        assert message_cost(*known, costs.message(size, "train"), experiment.example) == real


class Allocations(TorchDispatchMode):
    """Counts the numbers that are given memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else [made]:
            if isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta:
                self.numbers = max(self.numbers, value.numel())
        return made


@pytest.mark.parametrize("case", small.fast_if(FAST.__contains__, small.METHODS))
def test_a_device_allocates_no_weights_to_find_out_what_they_cost(case: str) -> None:
    tables = small.fleet_tables(case, SIZES)
    tables["model"]["options"] = {"channels": [64, 128]}
    experiment = Experiment.from_config(configs.from_dict(tables))
    context = experiment.context.for_client()
    largest = max(parameter.numel() for parameter in context.template.parameters())
    with Allocations() as seen:
        costs = Costs(context, experiment.method, experiment.example)
        for task in TASKS:
            assert costs.most(Limits(1.0), task)
        costs.units(context.sizes[-1])
    assert seen.numbers < largest / 20


def test_an_upper_bound_that_no_fleet_can_train_is_refused_by_name() -> None:
    refuse_upper_bounds(methods.FedAvg())
    with pytest.raises(TrustError, match="FedAvg with these options sends devices more than they can train"):
        refuse_upper_bounds(methods.FedAvg(width="each"))


@pytest.mark.parametrize(
    "told", [None, [], 3, [{}], [{"width": 2.0}], [{"width": 0.0}], [{"width": "1"}], [{"width": 0.5, "mask": -3.0}]]
)
def test_sizes_that_no_network_has_are_refused(told: Any) -> None:
    with pytest.raises(TrustError, match=r"describes no experiment|no network can have the sizes"):
        known_in(Brief.of(made("fedavg")).found() | {"sizes": told})


def test_every_limit_of_a_budget_can_be_counted_without_weights_but_time_and_zeros() -> None:
    assert {*UNITS, "latency_ms", "nonzero_macs"} == {field.name for field in fields(Budget)}
