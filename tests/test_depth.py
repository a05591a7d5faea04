"""Blocks that can be removed are found by tracing, removed as the identity, and restored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from anysize import models
from anysize.elastic.depth import full_depth, restored, stages, why_none, without
from anysize.errors import ModelError


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU())


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("depth, parameters", [(1, 593_722), (2, 667_450), (3, 741_178)])
def test_conv_3_5_and_7_of_the_paper_come_out_of_one_model(depth: int, parameters: int) -> None:
    net = models.build("elf-cnn", (1, 28, 28), 26)
    found = stages(net, torch.zeros(2, 1, 28, 28))
    assert full_depth(found) == 3
    assert count(without(net, found, depth)) == parameters
    assert count(models.build("elf-cnn", (1, 28, 28), 26, {"blocks": depth})) == parameters


@pytest.mark.parametrize("depth, name, parameters", [(2, 14, 175_258), (3, 20, 272_474), (5, 32, 466_906)])
def test_resnet_14_20_and_32_come_out_of_one_model(depth: int, name: int, parameters: int) -> None:
    net = models.build("resnet32", (3, 32, 32), 10)
    found = stages(net, torch.zeros(2, 3, 32, 32))
    assert full_depth(found) == 5
    small = without(net, found, depth)
    assert count(small) == parameters
    other = models.build(f"resnet{name}", (3, 32, 32), 10)
    kept = {key: tensor for key, tensor in net.state_dict().items() if key in other.state_dict()}
    other.load_state_dict(kept)
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(small.eval()(x), other.eval()(x))


def test_a_removed_block_is_the_identity_and_the_last_of_a_stage_goes_first() -> None:
    net = nn.Sequential(convolution(3, 4), convolution(4, 4), convolution(4, 4), nn.Flatten(), nn.Linear(16, 2))
    found = stages(net, torch.zeros(2, 3, 2, 2))
    assert [stage.removed(2) for stage in found] == [(("2",),)]
    small = without(net, found, 2)
    assert isinstance(small[2], nn.Identity)
    x = torch.rand(2, 3, 2, 2)
    by_hand = nn.Sequential(net[0], net[1], net[3], net[4]).eval()
    assert torch.equal(small.eval()(x), by_hand(x))


def test_a_removed_block_ignores_what_else_it_is_called_with() -> None:
    """Torch's own encoder gives every layer its mask."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    net = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    found = stages(net, torch.zeros(2, 5, 8))
    assert str(found[0]) == "layers.0: 3 blocks, of which 2 can be removed: layers.1, layers.2"
    x, mask = torch.rand(2, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    small = without(net, found, 2)
    by_hand = net.layers[1](net.layers[0](x, mask), mask)
    with torch.no_grad():
        torch.testing.assert_close(small(x, mask), by_hand)


def test_layers_that_stand_side_by_side_repeat_together() -> None:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    layers += [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()]
    (stage,) = stages(nn.Sequential(*layers, nn.MaxPool2d(2)), torch.zeros(2, 3, 4, 4))
    assert stage.blocks == (("3", "4", "5"),)


def test_a_block_that_shares_a_tensor_stays() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    (stage,) = stages(net, torch.zeros(2, 4))
    assert stage.blocks == (("1",),)


class Skipping(nn.Module):
    """Blocks of one kind that do not feed each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) + self.first(x)


def test_blocks_beside_each_other_are_no_stage_and_the_user_may_name_them_all_the_same() -> None:
    example = torch.zeros(2, 4)
    assert stages(Skipping(), example) == ()
    (stage,) = stages(Skipping(), example, [["second"]])
    assert stage.blocks == (("second",),)


def test_layers_inside_one_module_are_refused() -> None:
    net = models.build("char-lstm", (20,), 30)
    example = torch.zeros(2, 20, dtype=torch.int64)
    assert stages(net, example) == ()
    assert "'lstm' stacks 2 layers inside one module" in why_none(net)
    with pytest.raises(ModelError, match="layers inside one recurrent module"):
        stages(net, example, [["lstm.weight_ih_l1"]])


def test_a_named_block_that_changes_the_shape_is_refused_with_both_shapes() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    with pytest.raises(ModelError, match=r"'0' turns shape \(2, 4\) into \(2, 6\)"):
        stages(net, torch.zeros(2, 4), [["0"]])
    with pytest.raises(ModelError, match="unknown module '5'"):
        stages(net, torch.zeros(2, 4), [["5"]])


def test_what_stands_for_a_removed_block_is_zero_a_copy_of_the_last_kept_one_or_random() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    found = stages(net, torch.zeros(1, 3))
    tensors = {name: tensor.detach() for name, tensor in net.named_parameters()}
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("2")}
    missing = {name: tensor for name, tensor in tensors.items() if name.startswith("2")}
    zeros = restored(kept, missing, found, 2)
    assert set(zeros) == {"2.weight", "2.bias"}
    assert all(not tensor.any() for tensor in zeros.values())
    copied = restored(kept, missing, found, 2, "replicate")
    assert torch.equal(copied["2.weight"], tensors["1.weight"])
    drawn = restored(kept, missing, found, 2, "random", torch.Generator().manual_seed(0))
    assert drawn["2.weight"].shape == (3, 3)
    assert drawn["2.weight"].unique().numel() == 9


def test_an_identity_for_a_removed_block_leaves_the_function_of_the_shallow_network() -> None:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(torch.relu(self.first(x)))

    plain = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), block(), block(), block())
    for net, x in ((plain, torch.rand(2, 1, 5, 5)), (nn.Sequential(Residual(), Residual()), torch.rand(2, 5))):
        net.eval()
        found = stages(net, x)
        shallow = without(net, found, 1)
        start = {name: tensor.detach() for name, tensor in net.named_parameters()}
        kept = dict(shallow.named_parameters())
        missing = {name: tensor for name, tensor in start.items() if name not in kept}
        assert missing
        expected = shallow(x)
        net.load_state_dict(restored(kept, missing, found, 1, "identity"), strict=False)
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)
