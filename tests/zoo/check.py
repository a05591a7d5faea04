"""What a network of the zoo must do: narrow to two widths, shrink, run, train, and answer as it should.

Two oracles know nothing of the tracer. A group narrowed alone gives what the full network gives with the dropped units
silenced, unless something normalises over them or takes a size of theirs as a factor. And the full network gives the
same answer with the units of its groups in another order, unless an order is built into it (rotary pairs, waves of
positions, norms over groups of channels, what random rotations make of channels). A network that draws random numbers,
as Reformer does, draws the same in every call. `catalogue.ORDERED` says why the others answer otherwise.
"""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import anysize as az
from anysize.config.packages import load_torchvision
from anysize.elastic.axes import Group
from anysize.errors import ModelError
from zoo.entries import Entry

WIDTHS = (0.5, 0.25)
READS: dict[type[nn.Module], int] = {
    nn.Linear: 1, nn.Conv1d: 1, nn.Conv2d: 1, nn.Conv3d: 1, nn.ConvTranspose1d: 0, nn.ConvTranspose2d: 0,
    nn.ConvTranspose3d: 0,
}  # fmt: skip


@dataclass
class Finding:
    """What was found of one network.

    Attributes:
        parameters: of the whole network and at each width.
        exact: how many of the groups that were tried alone give the full network with the dropped units silenced.
        tried: how many groups were tried alone.
        reordered: how many of the groups may have their units in another order.
        moved: how many groups were tried in another order: all at once or, if that differs, a few alone.
        trace_s: the time of the trace.
        error: why it failed; empty if it did not.
        keep: what the errors say to keep whole, with which the network then narrows, runs and trains.
    """

    name: str
    parameters: tuple[int, ...] = ()
    groups: int = 0
    exact: int = 0
    tried: int = 0
    reordered: int = 0
    moved: int = 0
    trace_s: float = 0.0
    error: str = ""
    keep: tuple[str, ...] = ()

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def built(entry: Entry) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network with the same random weights in every run, none of them zero, and its inputs."""
    load_torchvision()
    torch.manual_seed(0)
    network = entry.build().eval().float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():  # zeros, as of biases and gates, would hide mistakes
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return network, entry.inputs()


def first(answer: Any) -> Tensor:
    """The first tensor of what a network returned."""
    while not isinstance(answer, Tensor):
        answer = next(iter(answer.values())) if isinstance(answer, dict) else answer[0]
    return answer


def answered(network: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The first tensor that a network returns, whatever it draws being the same every time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return first(network(*inputs))


def parameters_of(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def train_one_step(network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One step towards zero; fails unless every gradient is finite and some weight moves."""
    network = copy.deepcopy(network).train()
    for parameter in network.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    loss = first(network(*inputs)).float().pow(2).mean()
    loss.backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert gradients, "no weight has a gradient"
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients), "a gradient is not finite"
    optimizer.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, network.parameters())), "nothing was learned"


def reads(layer: nn.Module) -> int | None:
    """The axis of a layer's weight along which it reads units."""
    if type(layer).__name__ == "Conv1D":  # the linear layer of GPT-2 in transformers
        return 0
    return next((axis for kind, axis in READS.items() if isinstance(layer, kind)), None)


def silenced(network: nn.Module, axes: az.Axes, group: str, kept: Any) -> nn.Module:
    """The full network with zeros, in every layer that reads them, for the units of a group that are not kept."""
    copied = copy.deepcopy(network)
    layers = dict(copied.named_modules(remove_duplicate=False))
    gone = set(range(axes.group(group).size)) - set(kept.units(group))
    for member in axes.group(group).members:
        owner, _, kind = member.name.rpartition(".")
        if kind != "weight" or reads(layers[owner]) != member.axis:
            continue
        rows = [place for place, unit in enumerate(member.units) if unit in gone]
        with torch.no_grad():
            copied.get_parameter(member.name).index_fill_(member.axis, torch.tensor(rows, dtype=torch.long), 0.0)
    return copied


def agreeing_groups(network: nn.Module, inputs: tuple[Tensor, ...], axes: az.Axes, most: int = 3) -> tuple[int, int]:
    """How many of a few groups, narrowed alone, equal the full network with dropped units silenced; of how many."""
    groups = [group.name for group in axes.groups if group.size > 1]
    step = max(1, len(groups) // most)
    chosen = groups[::step][:most]
    exact = 0
    for name in chosen:
        kept = axes.kept({name: 0.5})
        small = az.narrow(network, axes, kept, verify=False).eval()
        exact += equal(answered(small, inputs), answered(silenced(network, axes, name, kept), inputs))
    return exact, len(chosen)


def equal(answer: Tensor, wanted: Tensor) -> bool:
    """Whether two answers agree, as far as sums of many numbers do."""
    return torch.allclose(answer, wanted, rtol=1e-3, atol=1e-4 * max(1.0, float(wanted.abs().max())))


def reorder(network: nn.Module, axes: az.Axes, groups: Sequence[str]) -> nn.Module:
    """The network with the units of these groups in the opposite order, on every axis that has them."""
    copied = copy.deepcopy(network)
    tensors = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
    for member in (member for name in groups for member in axes.group(name).members if member.name in tensors):
        places: dict[int, list[int]] = {}
        for place, unit in enumerate(member.units):
            places.setdefault(unit, []).append(place)
        places.pop(-1, None)
        order = torch.arange(len(member.units))
        for unit, other in zip(sorted(places), sorted(places, reverse=True)):
            order[torch.tensor(places[unit])] = torch.tensor(places[other])
        with torch.no_grad():
            tensors[member.name].copy_(tensors[member.name].index_select(member.axis, order))
    return copied


def movable_groups(network: nn.Module, inputs: tuple[Tensor, ...], axes: az.Axes, most: int = 4) -> tuple[int, int]:
    """How many groups may have their units in another order; of how many that were tried.

    What differs by rounding alone, as where a maximum decides which of two values goes on, agrees in double precision.
    """
    groups = [group.name for group in axes.groups if group.size > 1 and _alike(group)]
    for one, given in ((network, inputs), precise(network, inputs)):
        full = answered(one, given)
        if equal(answered(reorder(one, axes, groups), given), full):
            return len(groups), len(groups)
    chosen = groups[:: max(1, len(groups) // most)][:most]
    return sum(equal(answered(reorder(one, axes, [name]), given), full) for name in chosen), len(chosen)


def precise(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A copy of the network, and its inputs, in double precision."""
    doubled = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
    return copy.deepcopy(network).double(), doubled


def _alike(group: Group) -> bool:
    """Whether every unit of a group has the same number of elements on each axis."""
    counts = (Counter(unit for unit in member.units if unit >= 0) for member in group.members)
    return all(len(set(count.values())) == 1 and len(count) == group.size for count in counts)


def check(entry: Entry, *, oracle: bool = True) -> Finding:
    """Everything that is asked of a network; raises what it raises."""
    network, inputs = built(entry)
    found = Finding(entry.name)
    started = time.perf_counter()
    axes = az.trace(network, inputs)
    found.trace_s = round(time.perf_counter() - started, 2)
    found.groups = len(axes.groups)
    found.parameters = counts = narrowed(network, inputs, axes)
    assert counts[1] < 0.75 * counts[0], f"half the width has {counts[1]} of {counts[0]} parameters"
    assert counts[2] < 0.75 * counts[1] or counts[2] < 0.45 * counts[0], (
        f"a quarter has {counts[2]}, a half {counts[1]}"
    )
    if oracle:
        found.exact, found.tried = agreeing_groups(network, inputs, axes)
        found.reordered, found.moved = movable_groups(network, inputs, axes)
    return found


def narrowed(network: nn.Module, inputs: tuple[Tensor, ...], axes: az.Axes) -> tuple[int, ...]:
    """The parameters of the whole network and at each width, at which it must run and learn."""
    with torch.no_grad():
        full = first(network(*inputs))
    counts = [parameters_of(network)]
    for width in WIDTHS:
        small = az.narrow(network, axes, width).eval()
        with torch.no_grad():
            assert first(small(*inputs)).shape == full.shape, "the output has another shape"
        counts.append(parameters_of(small))
        train_one_step(small, inputs)
    return tuple(counts)


def way_out(entry: Entry) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """What the errors of a refused network say to keep whole, taken at their word one after another, and the
    parameters at each width with it.
    """
    network, inputs = built(entry)
    keep: tuple[str, ...] = ()
    while True:
        try:
            counts = narrowed(network, inputs, az.trace(network, inputs, keep=keep))
        except ModelError as error:
            more = advised(str(error))
            if set(more) <= set(keep):
                raise
            keep = (*keep, *more)
            continue
        assert counts[0] > counts[1] > counts[2], f"{counts} parameters"
        return keep, counts


def advised(error: str) -> tuple[str, ...]:
    """The layers that an error says to keep whole: those that it lists, or the one where it happened.

    >>> advised("... as in keep=['head', 'stem']"), advised("... at stem.0 (net.py:3): ... with keep=[...]")
    (('head', 'stem'), ('stem.0',))
    """
    listed = re.search(r"keep=\[('[^\]]*')\]", error)
    place = re.search(r" at ([\w.]+) \(", error)
    return tuple(re.findall(r"'([^']+)'", listed[1])) if listed else (place[1],) if place else ()
