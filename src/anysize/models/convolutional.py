"""Convolutional networks without residual sums."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from anysize.errors import ModelError
from anysize.models.shapes import image, positive


def small_cnn(input_shape: Sequence[int], classes: int, channels: Sequence[int] = (32, 64, 128)) -> nn.Sequential:
    """3x3 convolutions with batch-norm, pooled early: fast on a CPU.

    The image is halved after every convolution as long as two pixels are left; what remains is averaged to at most
    4 x 4 and flattened into the classifier. Weights have torch's default initialisation.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        channels: of each convolution.
    """
    width, *sides = image("small-cnn", input_shape)
    positive("small-cnn", channels=[*channels, classes])
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, out in enumerate(channels, start=1):
        layers[f"conv{number}"] = nn.Conv2d(width, out, 3, padding=1, bias=False)
        layers[f"norm{number}"] = nn.BatchNorm2d(out)
        layers[f"relu{number}"] = nn.ReLU()
        if min(sides) >= 4:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
            sides = [side // 2 for side in sides]
        width = out
    if max(sides) > 4:
        sides = [min(side, 4) for side in sides]
        layers["average"] = nn.AdaptiveAvgPool2d((sides[0], sides[1]))
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(width * sides[0] * sides[1], classes)
    return nn.Sequential(layers)


def flanc_cnn(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """The Fashion-MNIST network of FLANC: a stem and two 3x3 convolutions, no batch-norm.

    There is no ReLU after the stem, and only the stem and the head have a bias, as in the authors' code; keep
    `stem` whole for their parameter counts. Weights have torch's default initialisation.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
    """
    channels, height, width = image("flanc-cnn", input_shape)
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(channels, 64, 3, padding=1),
            conv1=nn.Conv2d(64, 128, 3, padding=1, bias=False),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(128, 128, 3, padding=1, bias=False),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            head=nn.Linear(128 * (height // 4) * (width // 4), classes),
        )
    )


def elf_cnn(input_shape: Sequence[int], classes: int, blocks: int = 3) -> nn.Sequential:
    """The EMNIST network of eLF: a stem, two rows of 3x3 convolutions, two linear layers; Conv7 with three each.

    Conv3 and Conv5 of the paper have one and two convolutions in each row. Convolutions have no bias. The paper does
    not say where the image is halved: here after the stem and after each row, the last time rounding up, which gives
    the paper's number of parameters for 28 x 28 images. Nor does it give the initialisation: here convolutions and the
    hidden layer have He's, since with torch's default seven layers without a norm leave almost nothing of a signal,
    and the network learns nothing for many rounds.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        blocks: convolutions in each row.
    """
    channels, *sides = image("elf-cnn", input_shape)
    positive("elf-cnn", blocks=blocks, classes=classes)
    height, width = (-(-(side // 4) // 2) for side in sides)
    hidden = nn.Linear(64 * height * width, 512)
    nn.init.kaiming_normal_(hidden.weight, nonlinearity="relu")
    return nn.Sequential(
        OrderedDict(
            stem=_convolved(channels, 32),
            pool1=nn.MaxPool2d(2),
            group1=nn.Sequential(_convolved(32, 64), *(_convolved(64, 64) for _ in range(blocks - 1))),
            pool2=nn.MaxPool2d(2),
            group2=nn.Sequential(*(_convolved(64, 64) for _ in range(blocks))),
            pool3=nn.MaxPool2d(2, ceil_mode=True),
            flatten=nn.Flatten(),
            linear=hidden,
            relu=nn.ReLU(),
            head=nn.Linear(512, classes),
        )
    )


def _convolved(channels_in: int, channels_out: int) -> nn.Sequential:
    """A 3x3 convolution with He's initialisation, and its ReLU."""
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return nn.Sequential(OrderedDict(conv=convolution, relu=nn.ReLU()))


def digits_cnn(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """The digits network of Split-Mix: three 5x5 convolutions and three linear layers, all with batch-norm.

    Weights have torch's default initialisation.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
    """
    channels, height, width = image("digits-cnn", input_shape)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 64, 5, padding=2),
            norm1=nn.BatchNorm2d(64),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(64, 64, 5, padding=2),
            norm2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(64, 128, 5, padding=2),
            norm3=nn.BatchNorm2d(128),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            linear1=nn.Linear(128 * (height // 4) * (width // 4), 2048),
            norm4=nn.BatchNorm1d(2048),
            relu4=nn.ReLU(),
            linear2=nn.Linear(2048, 512),
            norm5=nn.BatchNorm1d(512),
            relu5=nn.ReLU(),
            head=nn.Linear(512, classes),
        )
    )


def vgg11(
    input_shape: Sequence[int], classes: int, channels: Sequence[int] = (64, 128, 256, 256, 512, 512, 512, 512)
) -> nn.Sequential:
    """VGG-11 for small images: eight 3x3 convolutions with batch-norm, one linear layer.

    Pooled after the first, second, fourth, sixth and eighth convolution as long as two pixels are left; what remains is
    averaged. Weights have torch's default initialisation.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        channels: of each convolution.
    """
    width, *sides = image("vgg11", input_shape)
    positive("vgg11", channels=[*channels, classes])
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, out in enumerate(channels, start=1):
        layers[f"conv{number}"] = nn.Conv2d(width, out, 3, padding=1, bias=False)
        layers[f"norm{number}"] = nn.BatchNorm2d(out)
        layers[f"relu{number}"] = nn.ReLU()
        if (number == 1 or number % 2 == 0) and min(sides) >= 2:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
            sides = [side // 2 for side in sides]
        width = out
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(width, classes)
    return nn.Sequential(layers)


def femnist_cnn(input_shape: Sequence[int], classes: int, channels: Sequence[int] = (64, 64)) -> nn.Sequential:
    """The handwriting network of PriSM: a 5x5 and a 3x3 convolution, pooled, one linear layer, no batch-norm.

    Weights have torch's default initialisation.

    Args:
        input_shape: (C, H, W).
        classes: outputs.
        channels: of both convolutions.
    """
    colours, height, width = image("femnist-cnn", input_shape)
    positive("femnist-cnn", channels=[*channels, classes])
    if len(channels) != 2:
        raise ModelError(
            f"model 'femnist-cnn': channels is {list(channels)}; allowed: two numbers, one per convolution"
        )
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(colours, channels[0], 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(channels[0], channels[1], 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            head=nn.Linear(channels[1] * (height // 4) * (width // 4), classes),
        )
    )


def alexnet(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """AlexNet with batch-norm after every layer, for photographs of about 256 x 256, as Split-Mix uses it.

    Weights have torch's default initialisation.

    Args:
        input_shape: (C, H, W), at least 63 x 63.
        classes: outputs.
    """
    channels, height, width = image("alexnet", input_shape)
    if min(height, width) < 63:
        raise ModelError(f"model 'alexnet': images of {height} x {width} are too small; at least 63 x 63 is needed")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    kinds = [(64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1)]
    for number, (out, kernel, stride, padding) in enumerate(kinds, start=1):
        layers[f"conv{number}"] = nn.Conv2d(channels, out, kernel, stride, padding)
        layers[f"norm{number}"] = nn.BatchNorm2d(out)
        layers[f"relu{number}"] = nn.ReLU()
        if number in (1, 2, 5):
            layers[f"pool{number}"] = nn.MaxPool2d(3, 2)
        channels = out
    layers["average"] = nn.AdaptiveAvgPool2d(6)
    layers["flatten"] = nn.Flatten()
    inputs = channels * 6 * 6
    for number in (1, 2):
        layers[f"linear{number}"] = nn.Linear(inputs, 4096)
        layers[f"norm{number + 5}"] = nn.BatchNorm1d(4096)
        layers[f"relu{number + 5}"] = nn.ReLU()
        inputs = 4096
    layers["head"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)
