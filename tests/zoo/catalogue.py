"""Every network of the zoo, and how those that are refused narrow all the same."""

from __future__ import annotations

from zoo import language, others, vision

ENTRIES = {entry.name: entry for entry in (*language.ENTRIES, *vision.ENTRIES, *others.ENTRIES)}

WAYS_OUT = {
    # 256 channels become 32,896 products of two, which the head reads one by one
    "pytorchcv/isqrtcovresnet18": ("output",),
    # the network is built with two stages that its forward leaves out
    "segmentation/PSPNet-resnet18": ("encoder.layer4.0.conv2", "encoder.layer4.1.conv1"),
    # eight outputs are viewed as two times four, both written as numbers
    "transformers/wavlm": ("gru_rel_pos_linear",),
    # a shortcut adds as many zeros as two numbers of the constructor say
    "monai/FlexibleUNet": ("encoder.layer2", "encoder.layer3", "encoder.layer4"),
}
"""What each error says to keep whole; then the rest narrows, runs and trains."""
