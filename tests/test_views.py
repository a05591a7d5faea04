"""Networks inside a network: they compute what their own copies would, and their gradients reach the one set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anysize.elastic.axes import trace
from anysize.elastic.skeleton import fill, hollow, tensors_of
from anysize.elastic.slicing import narrow, scatter_
from anysize.elastic.views import Nested, _window, statistics_names, within
from anysize.testing import convolutional

WIDTHS = [0.25, 0.5, 1.0]


class Reader(nn.Module):
    """Two LSTM layers of which the second reads both directions of the first, and a head over a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.LSTM(8, 8, 2, bidirectional=True, batch_first=True)
        self.beside = nn.Linear(8, 8)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, 2)
        return self.head(torch.cat([self.rows(rows)[0][:, -1], self.beside(rows[:, 0])], 1))


class Twice(nn.Module):
    """A weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.third(torch.tanh(self.second(self.first(x.flatten(1)))))))


MODELS = {"conv": convolutional, "reader": Reader, "twice": Twice}


def made(model: str) -> tuple[nn.Module, Nested, list[nn.Module]]:
    """A full network, the nested ones over a copy of its tensors, and each width cut out of it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = MODELS[model]()
    axes = trace(net, torch.zeros(2, 1, 8, 8))
    cuts = [narrow(net, axes, width) for width in WIDTHS]
    nested = Nested([hollow(each) for each in cuts], axes, WIDTHS, own=statistics_names(net))
    tensors = {f"network.{name}": tensor for name, tensor in tensors_of(net).items()}
    for i, each in enumerate(cuts[:-1]):
        tensors |= {f"inner.{i}.{name}": tensors_of(each)[name] for name in statistics_names(each)}
    filled = fill(nested, tensors)
    assert isinstance(filled, Nested)
    return net, filled, cuts


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("model", MODELS)
def test_an_inner_network_computes_and_learns_what_its_own_copy_would(model: str, layout: torch.memory_format) -> None:
    net, nested, cuts = made(model)
    nested.to(memory_format=layout)  # type: ignore[call-overload]
    axes = trace(net, torch.zeros(2, 1, 8, 8))
    x, y = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 4
    for place, own in enumerate(cuts):
        nested.zero_grad()
        output = nested.at(place)(x)
        torch.testing.assert_close(output, own(x))
        nn.functional.cross_entropy(output, y).backward()
        own.train().zero_grad()
        nn.functional.cross_entropy(own(x), y).backward()
        for name, parameter in own.named_parameters():
            expected = torch.zeros(axes.shapes[name])
            scatter_(expected, axes.index(name, axes.kept(WIDTHS[place])), parameter.grad)
            torch.testing.assert_close(nested.network.get_parameter(name).grad, expected, rtol=1e-4, atol=1e-6)


def test_running_statistics_of_one_width_are_untouched_by_another() -> None:
    _, nested, cuts = made("conv")
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    before = tensors_of(nested)
    before = {name: tensor.clone() for name, tensor in before.items()}
    nested.at(1)(x)
    cuts[1](x)
    changed = {name for name, tensor in tensors_of(nested).items() if not torch.equal(tensor, before[name])}
    assert changed == {f"inner.1.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    torch.testing.assert_close(nested.inner[1].get_buffer("1.running_mean"), cuts[1].get_buffer("1.running_mean"))


def test_inner_networks_add_no_parameters_and_no_memory_but_their_own_statistics() -> None:
    net, nested, cuts = made("conv")
    assert {name for name, _ in nested.named_parameters()} == {f"network.{name}" for name, _ in net.named_parameters()}
    own = [buffer for name, buffer in nested.named_buffers() if name.startswith("inner.") and not buffer.is_meta]
    assert sum(buffer.numel() for buffer in own) == sum(
        2 * cut.get_buffer("1.running_mean").numel() + 1 for cut in cuts[:-1]
    )
    view = dict(nested.at(0)._tensors)["3.weight"]  # type: ignore[arg-type]
    assert view.untyped_storage().data_ptr() == nested.network[3].weight.untyped_storage().data_ptr()  # type: ignore[index]


def test_places_within_a_smaller_network_are_those_within_the_full_one() -> None:
    net = Reader()
    axes = trace(net, torch.zeros(2, 1, 8, 8))
    small, large = axes.kept(0.25), axes.kept(0.5)
    for name, tensor in tensors_of(net).items():
        numbered = torch.arange(tensor.numel()).reshape(tensor.shape)
        for axis, places in enumerate(within(axes, name, small, large)):
            inner, outer = axes.index(name, small)[axis], axes.index(name, large)[axis]
            if places is not None:
                assert inner is not None
                kept = torch.arange(numbered.shape[axis]) if outer is None else outer
                assert torch.equal(kept[places], inner)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_windows_gradient_has_the_layout_of_the_whole_and_is_made_without_placeholders(
    layout: torch.memory_format,
) -> None:
    whole = torch.rand(6, 5, 3, 3).to(memory_format=layout).requires_grad_()
    with Kinds() as kinds:
        _window(whole, ((0, 1, 2), (1, 0, 3))).sum().backward()
    expected = np.zeros(whole.shape)
    expected[1:3, :3] = 1
    assert whole.grad is not None
    assert whole.grad.numpy().tolist() == expected.tolist()
    assert whole.grad.stride() == whole.stride()
    assert kinds.seen == {"cpu"}


class Kinds(TorchDispatchMode):
    """Notes on which devices tensors are made: each placeholder takes several times as long as a small step needs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        self.seen |= {made.device.type} if isinstance(made, Tensor) else set()
        return made
