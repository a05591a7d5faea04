"""Operations on the meta device are computed once, and their results are those that torch gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from anysize.cost.shapes import Remembered

CASES = {
    "product": lambda x: x.flatten(1) @ x.flatten(1).T,
    "promotion": lambda x: (x > 0) + 1,
    "an integer": lambda x: x.long() + 1,
    "a float": lambda x: x.long() + 1.0,
    "a truth": lambda x: x.long() + True,
    "channels last": lambda x: functional.conv2d(x.to(memory_format=torch.channels_last), x[:3, :, :3, :3]),
    "several results": lambda x: torch.max(x, dim=1)[1],
    "a view": lambda x: x.transpose(0, 1)[1:],
    "an expanded result": lambda x: x.sum(1, keepdim=True).expand(-1, 3, -1, -1),
    "batch-norm": lambda x: nn.BatchNorm2d(3, device="meta")(x),
    "in place": lambda x: (x * 2).relu_().add_(1),
    "in place, another form": lambda x: (x * 2).transpose_(0, 1).squeeze_(),
    "a given result": lambda x: torch.add(x.detach(), 1, out=torch.empty(4, 3, 5, 5, device="meta")),
    "embedding": lambda x: functional.embedding(x.long(), x[0, 0]),
}


def form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("name", CASES)
def test_a_remembered_result_has_the_form_that_torch_gives(name: str) -> None:
    def given() -> Tensor:
        return torch.empty(4, 3, 5, 5, device="meta", requires_grad=True)

    expected = form(CASES[name](given()))
    with Remembered():
        assert [form(CASES[name](given())) for _ in range(2)] == [expected, expected]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


def test_torch_computes_an_operation_once_for_each_form_of_its_tensors() -> None:
    narrow, wide = (torch.empty(7, width, 11, device="meta") for width in (13, 17))
    with Seen() as seen, Remembered():
        for x in (narrow, wide, narrow, narrow):
            x + 1
    assert seen.operations.count(torch.ops.aten.add.Tensor) == 2


def test_results_of_the_same_operation_do_not_share_their_memory() -> None:
    x = torch.empty(2, 3, device="meta")
    with Remembered():
        results = [x + 1 for _ in range(3)]
    assert len({result.untyped_storage()._cdata for result in results}) == 3


def test_an_operation_in_place_returns_its_tensor() -> None:
    with Remembered():
        for _ in range(3):
            x = torch.empty(2, 3, device="meta")
            assert x.sigmoid_() is x


def test_gradients_have_the_forms_of_their_tensors() -> None:
    layer = nn.Conv2d(3, 4, 3, device="meta")
    with Remembered():
        for _ in range(2):
            layer.zero_grad()
            x = torch.empty(2, 3, 6, 6, device="meta", requires_grad=True)
            layer(x).relu().sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape
            assert layer.weight.grad is not None
            assert layer.weight.grad.shape == layer.weight.shape


def test_real_numbers_are_computed() -> None:
    with Remembered():
        assert [(torch.ones(2) * k).sum().item() for k in (1, 2, 3)] == [2, 4, 6]
