"""Costs counted without memory are those of real steps on real tensors, and of the bytes that are really sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small
from anysize.client.batches import draw
from anysize.client.objectives import make_objective, proximal
from anysize.client.process import one_thread
from anysize.client.work import perform
from anysize.cost.count import Cost, forward_macs, measure, trained, tried
from anysize.data import Data
from anysize.elastic.fast import layout
from anysize.experiment.sizes import GRID
from anysize.methods import FLANC, Client, FedAvg, FedHM, HeteroFL, Method, PriSM, SplitMix, SubModel
from anysize.methods.context import Context
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.runs.experiment import Experiment
from anysize.testing import convolutional
from anysize.wire import dump, size_bytes
from multiplied import multiplied

METHODS: dict[str, Method[Any]] = {
    "fedavg": FedAvg(),
    "fedavg each": FedAvg(width="each"),
    "heterofl": HeteroFL(),
    "flanc": FLANC(),
    "flanc composed": FLANC(execution="compose"),
    "flanc mixed": FLANC(execution="mix"),
    "fedhm": FedHM(),
    "prism": PriSM(),
    "splitmix": SplitMix(),
    "splitmix apart": SplitMix(one_pass=False),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x.flatten(1, 2))[0][:, -1])


def experiment(method: Method[Any], model: nn.Module | None = None, batch_size: int = 6, **more: Any) -> Experiment:
    x = torch.randint(256, (96, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Experiment(
        data=Data(train=(x, torch.arange(96) % 4), test=(x, torch.arange(96) % 4)),
        clients=8,
        model=model or convolutional(),
        method=method,
        training={"batch_size": batch_size},
        **({"devices": {"capacities": [0.25, 0.5, 1.0]}} | more),
    )


def message_of(made: Experiment, state: Any, size: Size) -> SubModel:
    client = Client(3, 0, size, 1, made.shares.samples(3), made.config.seed)
    message = made.method.extract(made.context, state, client)
    return replace(message, ticket=replace(message.ticket, rate=0.05))


def real_step(made: Experiment, message: SubModel) -> tuple[int, int]:
    """(multiply-adds, bytes that autograd holds besides parameters) of a step as a client takes it."""
    context, method = made.context, made.method
    module = layout(method.build(context.for_client(), message)).train()
    batch = draw(made.shares.share(3).train, torch.arange(context.training.batch_size))
    received = {name: p.detach().clone() for name, p in module.named_parameters()}
    step = Step(0, torch.Generator(), received, make_objective(context.task, context.tricks, None))
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers()) if t.device.type == "cpu"}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    def work() -> None:
        loss = method.loss(module, batch, step)
        if context.tricks.proximal:
            loss = loss + proximal(module, received, context.tricks)
        loss.backward()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        macs = multiplied(work)
    return macs, sum(t.untyped_storage().nbytes() for address, t in held.items() if address not in own)


@pytest.mark.parametrize("tricks", [{"batch_norm": "tracked"}, {"batch_norm": "batch", "proximal": 0.5}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_training_is_counted_as_a_real_step_on_real_tensors(method: str, tricks: dict[str, Any]) -> None:
    made = experiment(METHODS[method], tricks=tricks)
    state = made.method.init(made.context)
    for size in made.context.sizes:
        cost = made.cost(size, state=state)
        with one_thread():
            macs, memory = real_step(made, message_of(made, state, size))
        assert cost.training_macs == macs // 6
        # A convolution of one channel on the meta device does not tell its layout: the copy before Linear is not seen.
        assert cost.activation_bytes == pytest.approx(memory, rel=0.03)


class Rows(nn.Module):
    """An LSTM of two layers over learned features of an image's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 16)
        self.rows = nn.LSTM(16, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(self.features(x.flatten(1, 2)))[0][:, -1])


def separable() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 16, 1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


@pytest.mark.parametrize("network", [Rows, separable], ids=["recurrent", "depthwise"])
@pytest.mark.parametrize("method", METHODS)
def test_recurrent_and_depthwise_networks_are_counted_as_real_steps(
    method: str, network: Callable[[], nn.Module]
) -> None:
    made = experiment(METHODS[method], network())
    state = made.method.init(made.context)
    for size in made.context.sizes:
        with one_thread():
            macs, _ = real_step(made, message_of(made, state, size))
        assert made.cost(size, state=state).training_macs == macs // 6


def test_a_step_of_a_recurrent_network_is_counted_too() -> None:
    made = experiment(HeteroFL(), Recurrent())
    state = made.method.init(made.context)
    cost = made.cost(Size(1.0), state=state)
    steps, inputs, hidden = 8, 8, 16
    forward = steps * 3 * hidden * (inputs + hidden) + hidden * 4
    assert cost.macs == forward
    assert forward * 2 < cost.training_macs <= forward * 3


def test_a_forward_pass_is_counted_by_hand() -> None:
    made = experiment(HeteroFL(), convolutional(normalised=False))
    for width in (0.25, 0.5, 1.0):
        a, b, c = (round(width * n) for n in (8, 16, 16))
        by_hand = 64 * 9 * (1 * a + a * b) + 4 * b * c + c * 4
        assert made.cost(Size(width)).macs == by_hand
    each = experiment(FedAvg(width="each"), convolutional(normalised=False))
    assert each.cost(Size(0.5)).macs == made.cost(Size(0.5)).macs  # one network of the width is what is deployed


def test_batch_norm_on_batches_needs_no_statistics_to_be_counted() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    made = experiment(HeteroFL(), net, tricks={"batch_norm": "calibrated"})
    assert made.cost(Size(1.0)).macs == 64 * 8 + 8 * 4


@pytest.mark.parametrize(
    "tricks", [{"batch_norm": "tracked"}, {"batch_norm": "local", "classwise_head": True}], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_those_of_the_messages_of_a_real_client(method: str, tricks: dict[str, Any]) -> None:
    made = experiment(METHODS[method], tricks=tricks)
    state = made.method.init(made.context)
    for size in made.context.sizes:
        cost = made.cost(size, state=state)
        message = message_of(made, state, size)
        with one_thread():
            answer = perform(made.context.for_client(), made.method, message, made.shares.share(3))
        asked, told = message.ticket.to_json(), answer.to_json()
        down, up = len(dump(message.tensors, asked)), len(dump(answer.tensors, told))
        assert size_bytes(message.tensors, asked) == down
        assert size_bytes(answer.tensors, told) == up
        assert abs(cost.bytes_down - down) <= 16  # the ticket's numbers differ in length
        assert abs(cost.bytes_up - up) <= 24
        assert cost.bytes == cost.bytes_down + cost.bytes_up
        trained_here = made.method.build(made.context, message)
        assert cost.parameters == sum(p.numel() for p in trained_here.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_inference_bytes_are_those_of_the_customised_network(method: str) -> None:
    made = experiment(METHODS[method], tricks={"batch_norm": "tracked"})
    state = made.method.init(made.context)
    for size in made.method.sizes(made.context):
        network = made.method.customize(made.context, state, size)
        expected = sum(t.nbytes for t in network.state_dict().values())
        assert made.cost(size, state=state).inference_bytes == expected


def test_a_device_of_a_size_runs_the_largest_that_was_trained() -> None:
    context = experiment(FedAvg()).context
    assert trained(FedAvg(), context, Size(1.0)).label == "0.25"
    assert trained(HeteroFL(), context, Size(0.7)).label == "0.5"
    assert trained(HeteroFL(), context, Size(0.1)).label == "0.25"


def test_counting_changes_and_allocates_nothing() -> None:
    made = experiment(FLANC())
    state = made.method.init(made.context)
    before = copy.deepcopy(state)
    example = Batch(made.example.x, made.example.y)
    measure(made.context, made.method, state, Size(0.5), example)
    assert all(torch.equal(before.basis[name], state.basis[name]) for name in state.basis)
    assert example.x.device.type == "meta"


# Budgets


SHARES = {"parameters": 0.3, "macs": 0.8, "activation_bytes": 0.85, "bytes": 0.4}


# FLANC composes every layer where a budget limits activations, so that is what its widths cost here.
@pytest.mark.parametrize("method", [HeteroFL(), FLANC(execution="compose")], ids=lambda m: type(m).__name__)
def test_a_budget_is_met_by_the_largest_width_that_fits(method: Method[Any]) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    plain = experiment(method, net)
    costs = {width: cost_alone(plain, width).units() for width in GRID}
    budgets = {unit: share * costs[1.0][unit] for unit, share in SHARES.items()}
    groups = [{"name": unit, "fraction": 0.25, "budget": {unit: limit}} for unit, limit in budgets.items()]
    made = experiment(method, net, devices={"groups": groups})
    for unit, limit in budgets.items():
        best = max(width for width in GRID if costs[width][unit] <= limit)
        assert made.size_of_group[unit].width == best, unit
        assert made.size_of_group[unit].label == unit
    tight = [{"name": "both", "fraction": 1.0, "budget": budgets}]
    fits = [width for width in GRID if all(costs[width][unit] <= limit for unit, limit in budgets.items())]
    assert experiment(method, net, devices={"groups": tight}).size_of_group["both"].width == max(fits)


def test_a_capacity_of_a_unit_is_a_fraction_of_the_full_cost() -> None:
    made = experiment(HeteroFL(), devices={"capacities": [0.25, 1.0], "capacity_of": "parameters"})
    full = cost_alone(made, 1.0).parameters
    best = max(width for width in GRID if cost_alone(made, width).parameters <= 0.25 * full)
    assert sorted(size.width for size in made.sizes) == [best, 1.0]
    assert [size.label for size in made.sizes] == ["0.25", "1.0"]


def cost_alone(made: Experiment, width: float) -> Cost:
    """The cost of a width in a fleet of nothing else."""
    return made.cost(Size(width), made.context_for((Size(width),)))


def test_a_context_of_a_client_holds_no_weights() -> None:
    context: Context = experiment(HeteroFL()).context
    assert context.for_client().initial is None
    assert all(p.device.type == "meta" for p in context.template.parameters())
    with pytest.raises(AssertionError, match="only the server"):
        context.for_client().start()


def test_budgets_hold_in_the_fleet_that_they_make_together() -> None:
    """The inputs of FLANC's basis divide every trained input width, so a size costs more beside others than alone."""
    limits = {"watch": 16_370, "phone": 61_794, "tablet": 78_218}
    x = torch.zeros(8, 1, 28, 28, dtype=torch.uint8)
    made = Experiment(
        data=Data(train=(x, torch.arange(8) % 2), classes=10),
        clients=6,
        model="flanc-cnn",
        method="flanc",
        devices={"groups": [{"name": name, "budget": {"parameters": most}} for name, most in limits.items()]},
        evaluation={"on": ["clients"]},
    )
    state = made.method.init(made.context)
    for name, most in limits.items():
        assert made.cost(made.size_of_group[name], state=state).parameters <= most


@pytest.mark.parametrize("case", ["fedavg", "fjord", "flanc", "splitmix", "oat"])
def test_trying_a_size_counts_what_measuring_it_counts(case: str) -> None:
    attacked = {"model": {"name": "small-cnn", "options": {"channels": [4, 8]}}, "tricks": {"attack_steps": 2}}
    made = small.experiment(method={"name": case}, **(attacked if case == "oat" else {}))
    context, method = made.context, made.method
    state = method.init(context)
    for size in (context.sizes[0], context.sizes[-1]):
        cost = made.cost(size, state=state)
        assert tried(context, method, state, size, made.example) == (cost.parameters, cost.macs)


class _ReadsItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if (x * 2).sum() > 0 else -x


def test_a_remembered_operation_has_no_values_to_read() -> None:
    for _ in range(2):  # the second time, the shapes of all results are remembered
        with pytest.raises(RuntimeError, match="meta"):
            forward_macs(_ReadsItsInput(), torch.ones(2, 3, device="meta"))
