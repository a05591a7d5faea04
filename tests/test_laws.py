"""Every method keeps the laws, over its options, networks, fleets and tricks; and broken methods are caught."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import small
from anysize.elastic.skeleton import fill
from anysize.methods import (
    ELF,
    FIARSE,
    FLANC,
    OAT,
    Client,
    FedAvg,
    FedHM,
    FedRolex,
    FjORD,
    HeteroFL,
    Ladder,
    Method,
    OrigDrop,
    PriSM,
    SHeteroFL,
    SplitMix,
    SubModel,
    Update,
)
from anysize.methods.context import Context
from anysize.methods.heterofl import HeteroFLState
from anysize.methods.kit import checked, cut, paste, sub_model
from anysize.methods.mean import StreamingMean
from anysize.methods.size import Size
from anysize.testing import LAWS, check_method, convolutional
from anysize.wire import Tensors


class Residual(nn.Module):
    """Two residual blocks, the second with a projecting shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.first = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 48, 3, stride=2, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(48)
        self.shortcut = nn.Conv2d(32, 48, 1, stride=2, bias=False)
        self.head = nn.Linear(48, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.first_norm(self.first(x)) + x)
        x = torch.relu(self.second_norm(self.second(x)) + self.shortcut(x))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(x.flatten(1, 2))[0][:, -1])


class Tied(nn.Module):
    """Two layers that share their weight, not their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.third.weight = self.second.weight
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.flatten(1)))
        return self.head(torch.relu(self.third(torch.relu(self.second(x)))))


class TiedBeforeNorm(nn.Module):
    """Two layers share a weight; only one is followed by a batch-norm, so only the other is scaled by HeteroFL."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 16), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.third = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.third[0].weight = self.second[0].weight
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x.flatten(1)))))


class Joined(nn.Module):
    """The classifier sees the input beside what was made of it: only a part of its inputs changes with the width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16 + 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(torch.cat([torch.relu(self.second(torch.relu(self.first(x)))), x], 1))


def perceptron(*hidden: int, normalised: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip((64, *hidden), hidden):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after) if normalised else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 4))


def deep() -> nn.Module:
    """Three blocks in a row that keep their input's shape, of which two can be removed."""

    def block(channels_in: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels_in, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    stage = nn.Sequential(*(block(8) for _ in range(3)))
    return nn.Sequential(block(1), nn.MaxPool2d(4), stage, nn.Flatten(), nn.Linear(32, 4))


def odd_names() -> nn.Module:
    """Module names with every sign that the formats use inside."""
    net = nn.Sequential()
    for name, layer in (("a/b", nn.Linear(64, 16)), ("c:d%2F", nn.Linear(16, 16)), ("head", nn.Linear(16, 4))):
        net.add_module(f"flat {name}", nn.Flatten())
        net.add_module(name, layer)
    return net


MODELS = {
    "conv with batch-norm": convolutional,
    "conv without": lambda: convolutional(normalised=False),
    "mlp": lambda: perceptron(24, 16),
    "mlp with batch-norm": lambda: perceptron(24, 16, normalised=True),
    "one hidden layer": lambda: perceptron(16),
    "residual": Residual,
    "recurrent": Recurrent,
    "tied": Tied,
    "tied before a norm": TiedBeforeNorm,
    "joined": Joined,
    "odd names": odd_names,
    "deep": deep,
}
METHODS: dict[str, Method[Any]] = {
    "fedavg": FedAvg(),
    "fedavg each": FedAvg(width="each"),
    "heterofl": HeteroFL(),
    "flanc": FLANC(),
    "prism": PriSM(),
    "fedhm": FedHM(),
    "origdrop": OrigDrop(),
    "fedrolex": FedRolex(),
    "fiarse": FIARSE(),
    "fjord": FjORD(),
    "sheterofl": SHeteroFL(),
    "ladder": Ladder(),
    "splitmix": SplitMix(),
    "elf": ELF(proxy=0.3, proxy_epochs=1),
    "oat": OAT(),
}
VARIANTS: dict[str, Method[Any]] = {
    "heterofl unscaled": HeteroFL(scaler=False),
    "heterofl with ordered dropout": HeteroFL(ordered_dropout=True),
    "heterofl with shared convolutions": HeteroFL(share="convolutions", scaler=False),
    "flanc with ordered dropout": FLANC(ordered_dropout=True),
    "flanc with ordered dropout and own copies": FLANC(ordered_dropout=True, share_unscaled=False),
    "fjord with distillation": FjORD(distillation=True),
    "flanc own copies": FLANC(share_unscaled=False, basis_inputs=0.25, basis_size=0.5),
    "flanc to the request": FLANC(orthogonality=1.0, orthogonality_form="sum"),
    "flanc free": FLANC(orthogonality=0.0, basis_inputs=1.0, basis_size=1.0),
    "prism with drawn channels": PriSM(channels="drawn", kappa=4.0),
    "prism in windows": PriSM(channels="windows"),
    "prism with what nobody trained": PriSM(dropped="kept"),
    "prism with all channels": PriSM(channels="all"),
    "prism with averaged momentum": PriSM(momentum="averaged"),
    "prism top, never refreshed": PriSM(sampling="top", refresh_every=100, frobenius=0.0),
    "fedhm square": FedHM(reshape="square", pseudo_client=True),
    "origdrop kept": OrigDrop(dropped="kept"),
    "flanc mixed": FLANC(execution="mix"),
    "flanc shared": FLANC(share_dense=True, start="nested", basis_rate=0.25, coefficients_rate=2.0),
    "flanc products": FLANC(average="products", orthogonality=0.0),
    "flanc of more vectors than entries": FLANC(basis_inputs=0.01, basis_size=1.0),
    "sheterofl unscaled": SHeteroFL(scaler=False),
    "splitmix one after another": SplitMix(one_pass=False),
    "splitmix rescaled": SplitMix(rescale_layer=True),
    "splitmix of smaller bases": SplitMix(base_width=0.125),
}
BY_DEPTH: dict[str, Method[Any]] = {
    "elf": METHODS["elf"],
    "elf without masks": ELF(proxy=0.0, sparsities=(0.0,)),
    "elf over holders, widths too": ELF(proxy=0.3, proxy_epochs=1, average="holders", widths=(0.5, 1.0), scope="layer"),
    "elf with identities": ELF(proxy=0.0, sparsities=(0.0,), fill="identity"),
    "elf replicating": ELF(proxy=0.0, sparsities=(0.0,), fill="replicate"),
    "elf with random blocks": ELF(proxy=0.0, sparsities=(0.0,), fill="random"),
}
FLEETS = [(0.25, 0.5), (1.0,), (0.5,), (0.25, 0.3, 0.75, 1.0)]
TRICKS: list[dict[str, Any]] = [
    {"batch_norm": "batch"},
    {"batch_norm": "tracked", "classwise_head": False, "masked_loss": False},
    {"batch_norm": "calibrated", "weighting": "samples"},
    {"batch_norm": "local", "weighting": "clients"},
    {"classwise_head": True, "masked_loss": True, "proximal": 0.1},
    {"proximal": 1.0, "proximal_form": "mean", "weighting": "clients"},
]


def fresh(model: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MODELS[model]()


RUN = "conv with batch-norm"
"""The network with which whole runs are tried."""
RUN_TOO = ("flanc with ordered dropout", "prism with averaged momentum", "splitmix one after another")
"""The options with which whole runs are tried in the fast suite too."""


@pytest.mark.parametrize(
    "method, model",
    small.fast_if(
        lambda method, model: model == RUN or method == "heterofl",
        ["heterofl", "flanc", "prism", "fedhm", "fjord", "ladder", "fiarse"],
        MODELS,
    ),
)
def test_the_adaptive_methods_keep_the_laws_on_every_network(method: str, model: str) -> None:
    check_method(METHODS[method], fresh(model), whole_runs=model == RUN)


@pytest.mark.parametrize(
    "method, model",
    small.fast_if(
        lambda method, model: model == RUN,
        ["fedavg", "fedavg each"],
        ["conv with batch-norm", "recurrent", "tied", "odd names"],
    ),
)
def test_fedavg_keeps_the_laws_on_every_kind_of_network(method: str, model: str) -> None:
    check_method(METHODS[method], fresh(model), whole_runs=model == RUN)


@pytest.mark.parametrize(
    "model", small.fast_if(RUN.__eq__, ["conv with batch-norm", "residual", "mlp with batch-norm"])
)
def test_oat_keeps_the_laws_on_every_kind_of_network_with_batch_norm(model: str) -> None:
    check_method(METHODS["oat"], fresh(model), tricks={"attack_steps": 1}, whole_runs=model == RUN)


@pytest.mark.parametrize(
    "method, model",
    small.fast_if(
        lambda method, model: model == (RUN if method in RUN_TOO else "residual"), VARIANTS, [RUN, "residual"]
    ),
)
def test_every_option_keeps_the_laws(method: str, model: str) -> None:
    check_method(VARIANTS[method], fresh(model), whole_runs=model == RUN)


@pytest.mark.parametrize("method", small.fast_if("elf".__eq__, BY_DEPTH))
def test_every_option_of_depth_and_masks_keeps_the_laws(method: str) -> None:
    """Laws that zeros for removed blocks and masks cannot keep are declared in `ELF.exceptions`."""
    check_method(BY_DEPTH[method], fresh("deep"), (0.4, 0.7, 1.0))


@pytest.mark.parametrize("batch_norm", small.fast_if("batch".__eq__, ["batch", "calibrated", "local"]))
def test_depth_and_masks_keep_the_laws_with_every_batch_norm(batch_norm: str) -> None:
    check_method(METHODS["elf"], fresh("deep"), (0.4, 1.0), {"batch_norm": batch_norm})


@pytest.mark.parametrize(
    "method, capacities",
    small.fast_if(
        lambda method, capacities: method == "heterofl" or capacities == FLEETS[-1],
        ["fedavg each", "heterofl", "flanc", "prism", "fedhm", "origdrop", "fjord"],
        FLEETS,
    ),
    ids=str,
)
def test_every_method_keeps_the_laws_in_every_fleet(method: str, capacities: tuple[float, ...]) -> None:
    check_method(METHODS[method], fresh("conv without"), capacities, whole_runs=False)


@pytest.mark.parametrize(
    "method, tricks",
    small.fast_if(
        lambda method, tricks: method == "flanc" or tricks == TRICKS[0],
        ["fedavg", "heterofl", "flanc", "prism", "fjord"],
        TRICKS,
    ),
    ids=str,
)
def test_every_method_keeps_the_laws_with_every_trick(method: str, tricks: dict[str, Any]) -> None:
    check_method(METHODS[method], fresh("mlp with batch-norm"), [0.5, 1.0], tricks, whole_runs="batch_norm" in tricks)


@dataclass(frozen=True)
class Sound(Method[HeteroFLState]):
    """Prefix slices, averaged: keeps every law. Each method below breaks one of its verbs."""

    def sizes(self, context: Context) -> tuple[Size, ...]:
        return context.sizes

    def init(self, context: Context) -> HeteroFLState:
        return HeteroFLState(dict(context.start()))

    def extract(self, context: Context, state: HeteroFLState, client: Client) -> SubModel:
        width = client.size.width
        return sub_model(client, cut(context, state.tensors, width), width=width)

    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        mean = StreamingMean(state.tensors)
        for update in checked(context, updates):
            kept = context.axes.kept(update.width)
            index = {name: context.axes.index(name, kept) for name in update.tensors}
            mean.add(update.tensors, update.weight(context.tricks), index)
        return HeteroFLState(mean.result())

    def customize(self, context: Context, state: HeteroFLState, size: Size) -> nn.Module:
        return fill(context.skeleton(size.width), cut(context, state.tensors, size.width))


class LastWins(Sound):
    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        tensors = state.tensors
        for update in checked(context, updates):
            tensors = paste(context, tensors, update.tensors, update.width)
        return HeteroFLState(tensors)


class InPlace(Sound):
    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        after = super().aggregate(context, state, updates)
        for name, tensor in after.tensors.items():
            state.tensors[name].copy_(tensor)
        return after


class SpoilsUpdates(Sound):
    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        held = list(updates)
        after = super().aggregate(context, state, held)
        for update in held:
            update.tensors.popitem()[1].zero_()
        return after


class Masked(Sound):
    """Sends everybody the full tensors, and the smaller devices a mask besides: a small client pays for more."""

    def extract(self, context: Context, state: HeteroFLState, client: Client) -> SubModel:
        width = client.size.width
        inside = paste(context, _zeros(state.tensors), cut(context, state.tensors, width), width)
        masks = {f"mask.{name}": (tensor != 0).float() for name, tensor in inside.items()} if width < 1 else {}
        return sub_model(client, state.tensors | masks, width=1.0)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        full = {name: tensor for name, tensor in sub_model.tensors.items() if not name.startswith("mask.")}
        return fill(context.skeleton(1.0), full)


class ForgetsTheLast(Sound):
    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        first, *_ = updates
        return super().aggregate(context, state, [first])


class StopsEarly(Sound):
    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        return super().aggregate(context, state, [next(iter(updates))])


class LearnsNothing(Sound):
    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        super().aggregate(context, state, updates)
        return HeteroFLState(dict(state.tensors))


class Sums(Sound):
    """Weights that are not divided by their sum."""

    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        total = {name: tensor.clone() for name, tensor in state.tensors.items()}
        for update in checked(context, updates):
            ours = cut(context, total, update.width)
            moved = {n: ours[n] + 1e-3 * update.samples * (t - ours[n]) for n, t in update.tensors.items()}
            total = paste(context, total, moved, update.width)
        return HeteroFLState(total)


class Trusting(Sound):
    """Takes a mean without looking at what came."""

    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        mean = StreamingMean(state.tensors)
        for update in updates:
            kept = context.axes.kept(update.width)
            index = {name: context.axes.index(name, kept) for name in update.tensors}
            mean.add(update.tensors, update.weight(context.tricks), index)
        return HeteroFLState(mean.result())


class Dice(Sound):
    def extract(self, context: Context, state: HeteroFLState, client: Client) -> SubModel:
        message = super().extract(context, state, client)
        noisy = {n: t + 1e-3 * torch.rand(()) if t.is_floating_point() else t for n, t in message.tensors.items()}
        return replace(message, tensors=noisy)


class Hooked(Sound):
    def customize(self, context: Context, state: HeteroFLState, size: Size) -> nn.Module:
        network = super().customize(context, state, size)
        network.register_forward_hook(lambda module, inputs, output: output / 2)
        return network


class Wrapped(Sound):
    class Wrapper(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

    def customize(self, context: Context, state: HeteroFLState, size: Size) -> nn.Module:
        return self.Wrapper(super().customize(context, state, size))


class RunsAnother(Sound):
    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        network = super().build(context, sub_model)
        network.register_forward_hook(lambda module, inputs, output: 2 * output)
        return network


class Personal(Sound):
    """Builds a network that depends on who asked for it."""

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        network, who = super().build(context, sub_model), sub_model.ticket.client
        network.register_forward_hook(lambda m, inputs, output: output * (1 + who) if m.training else output)
        return network


class StartsElsewhere(Sound):
    def init(self, context: Context) -> HeteroFLState:
        return HeteroFLState({name: tensor + 1 for name, tensor in context.start().items()})


class LosesOnPack(Sound):
    def pack(self, module: nn.Module, sub_model: SubModel) -> Update:
        update = super().pack(module, sub_model)
        return replace(
            update, tensors={n: t * 0.999 if t.is_floating_point() else t for n, t in update.tensors.items()}
        )


class ReadsItsWeights(Sound):
    """What a client gets depends on values, so that nobody knows what it costs before there are any."""

    def extract(self, context: Context, state: HeteroFLState, client: Client) -> SubModel:
        alive = any(float(tensor.abs().max()) > 0 for tensor in state.tensors.values())
        return super().extract(context, state, client if alive else replace(client, size=context.sizes[0]))


@dataclass(frozen=True)
class PartState:
    tensors: Tensors
    rounds: Any


class Unsavable(Sound):
    """A state whose tuple comes back as a list."""

    def init(self, context: Context) -> Any:
        return PartState(dict(context.start()), ({"rounds": 1},))

    def aggregate(self, context: Context, state: Any, updates: Iterable[Update]) -> Any:
        return PartState(super().aggregate(context, state, updates).tensors, state.rounds)

    def extract(self, context: Context, state: Any, client: Client) -> SubModel:
        tensors = state.tensors if isinstance(state.rounds, tuple) else _zeros(state.tensors)
        return sub_model(client, cut(context, tensors, client.size.width), width=client.size.width)


class ShipsAnother(Sound):
    """Where the server's own weights are at hand, which they are not where networks are tested, it adds to them."""

    def customize(self, context: Context, state: HeteroFLState, size: Size) -> nn.Module:
        network = super().customize(context, state, size)
        if context.initial is not None:
            with torch.no_grad():
                next(reversed(list(network.parameters()))).add_(torch.arange(4.0))
        return network


class CountsRounds(Sound):
    """It has a memory outside its state, which another process does not have."""

    rounds: ClassVar[list[int]] = []

    def aggregate(self, context: Context, state: HeteroFLState, updates: Iterable[Update]) -> HeteroFLState:
        after = super().aggregate(context, state, updates)
        self.rounds.append(1)
        return HeteroFLState({name: tensor * (1 + len(self.rounds) / 1000) for name, tensor in after.tensors.items()})


BROKEN = {
    ShipsAnother: "reported_is_shipped",
    CountsRounds: "resumed_is_unbroken",
    LastWins: "order_of_clients",
    InPlace: "inputs_untouched",
    SpoilsUpdates: "inputs_untouched",
    Masked: "cost_is_monotone",
    ForgetsTheLast: "order_of_clients",
    StopsEarly: "updates_stream_once",
    LearnsNothing: "training_changes_something",
    Sums: "scale_of_weights",
    Trusting: "misfits_are_refused",
    Dice: "same_seed_same_bits",
    Hooked: "customised_is_ordinary",
    Wrapped: "customised_is_ordinary",
    RunsAnother: "clients_run_what_is_customised",
    Personal: "reused_networks_are_like_new",
    StartsElsewhere: "pretrained_start",
    LosesOnPack: "full_round_trip",
    Unsavable: "survives_saving",
    ReadsItsWeights: "costs_need_no_weights",
}


def test_a_sound_method_keeps_every_law() -> None:
    check_method(Sound())


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_method_is_caught_by_the_law_it_breaks(kind: type[Method[Any]]) -> None:
    with pytest.raises(AssertionError, match=rf"(?m)^  {BROKEN[kind]}: "):
        check_method(kind(), fresh("mlp with batch-norm"))


def test_every_law_catches_some_broken_method() -> None:
    caught = set(BROKEN.values()) | {"unchanged_updates"}  # LosesOnPack, below
    assert caught == set(LAWS)
    with pytest.raises(AssertionError, match=r"(?m)^  unchanged_updates: "):
        check_method(LosesOnPack(), fresh("mlp"))


def test_a_declared_exception_is_not_checked_and_a_foreign_one_is_named() -> None:
    class Excused(LastWins):
        exceptions = {"order_of_clients": "the last one wins", "no_such_law": "?"}  # noqa: RUF012

    with pytest.raises(AssertionError, match="'no_such_law', which is no law") as caught:
        check_method(Excused())
    assert "\n  order_of_clients" not in str(caught.value)


def _zeros(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
