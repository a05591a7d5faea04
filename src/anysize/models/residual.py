"""Residual networks for small images: a 3x3 stem without pooling, stages of two-convolution blocks.

Convolutions are initialised by Kaiming's rule for ReLU (normal, fan-out), norms with one and zero, the head
with torch's default: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, and "Identity
Mappings in Deep Residual Networks", ECCV 2016, for the pre-activation blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from anysize.errors import ModelError
from anysize.models.shapes import image, positive

Block = Callable[[int, int, int], nn.Module]


class ResidualBlock(nn.Module):
    """The sum of two 3x3 convolutions and a shortcut; norms after the convolutions."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, projects: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if projects or stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=projection, norm=nn.BatchNorm2d(channels_out)))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out)) + self.shortcut(x)
        active: Tensor = self.relu2(out)
        return active


class PreActivationBlock(nn.Module):
    """The sum of two 3x3 convolutions and a shortcut; norms and ReLU before the convolutions.

    A shortcut with a projection sees the activated input, one without sees the input itself.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.projects = stride != 1 or channels_in != channels_out
        self.shortcut: nn.Module = nn.Identity()
        if self.projects:
            self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = self.relu1(self.norm1(x))
        out: Tensor = self.conv2(self.relu2(self.norm2(self.conv1(active))))
        beside: Tensor = self.shortcut(active if self.projects else x)
        return out + beside


def resnet18(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (64, 128, 256, 512),
    project_first: bool = False,
) -> nn.Sequential:
    """ResNet-18 for 32 x 32 images: 3x3 stem, no first pooling.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        channels: of each stage.
        project_first: whether the first stage begins with a projection too, so that the stem can be kept whole while
            the stage is narrowed; FLANC's authors have it below full width.
    """
    return _post_activation("resnet18", input_shape, classes, channels, blocks=2, project_first=project_first)


def resnet14(input_shape: Sequence[int], classes: int, channels: Sequence[int] = (16, 32, 64)) -> nn.Sequential:
    """ResNet-14 for 32 x 32 images: three stages of two blocks, projecting shortcuts.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        channels: of each stage.
    """
    return _post_activation("resnet14", input_shape, classes, channels, blocks=2)


def resnet20(input_shape: Sequence[int], classes: int, channels: Sequence[int] = (16, 32, 64)) -> nn.Sequential:
    """ResNet-20 for 32 x 32 images: three stages of three blocks, projecting shortcuts.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        channels: of each stage.
    """
    return _post_activation("resnet20", input_shape, classes, channels, blocks=3)


def resnet32(input_shape: Sequence[int], classes: int, channels: Sequence[int] = (16, 32, 64)) -> nn.Sequential:
    """ResNet-32 for 32 x 32 images: three stages of five blocks, projecting shortcuts.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        channels: of each stage.
    """
    return _post_activation("resnet32", input_shape, classes, channels, blocks=5)


def preresnet18(
    input_shape: Sequence[int], classes: int, channels: Sequence[int] = (64, 128, 256, 512)
) -> nn.Sequential:
    """Pre-activation ResNet-18 for 32 x 32 images, as HeteroFL and Split-Mix use it.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        channels: of each stage.
    """
    colours = _checked("preresnet18", input_shape, classes, channels)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Conv2d(colours, channels[0], 3, padding=1, bias=False)
    layers |= _stages(PreActivationBlock, channels, blocks=2)
    layers["norm"] = nn.BatchNorm2d(channels[-1])
    layers["relu"] = nn.ReLU()
    return _started(_with_head(layers, channels[-1], classes))


def _post_activation(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int],
    blocks: int,
    project_first: bool = False,
) -> nn.Sequential:
    colours = _checked(name, input_shape, classes, channels)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Conv2d(colours, channels[0], 3, padding=1, bias=False)
    layers["norm"] = nn.BatchNorm2d(channels[0])
    layers["relu"] = nn.ReLU()
    layers |= _stages(ResidualBlock, channels, blocks, partial(ResidualBlock, projects=project_first))
    return _started(_with_head(layers, channels[-1], classes))


def _checked(name: str, input_shape: Sequence[int], classes: int, channels: Sequence[int]) -> int:
    colours, height, width = image(name, input_shape)
    positive(name, channels=channels, classes=classes)
    # Each stage after the first halves the image.
    if min(height, width) < 2 ** (len(channels) - 1):
        raise ModelError(f"model '{name}': {len(channels)} stages halve a {height} x {width} image to nothing")
    return colours


def _stages(
    block: Block, channels: Sequence[int], blocks: int, after_stem: Block | None = None
) -> OrderedDict[str, nn.Module]:
    """Stages of equal blocks, but for the one after the stem if that is given."""
    stages: OrderedDict[str, nn.Module] = OrderedDict()
    width = channels[0]
    for number, out in enumerate(channels, start=1):
        first = (after_stem or block)(width, out, 1) if number == 1 else block(width, out, 2)
        stages[f"stage{number}"] = nn.Sequential(first, *(block(out, out, 1) for _ in range(blocks - 1)))
        width = out
    return stages


def _with_head(layers: OrderedDict[str, nn.Module], width: int, classes: int) -> nn.Sequential:
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(width, classes)
    return nn.Sequential(layers)


def _started(network: nn.Sequential) -> nn.Sequential:
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network
