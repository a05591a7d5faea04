"""Every network of the zoo, and how those that are refused narrow all the same."""

from __future__ import annotations

from zoo import language, others, vision

ENTRIES = {entry.name: entry for entry in (*language.ENTRIES, *vision.ENTRIES, *others.ENTRIES)}

REFUSED = {
    "pytorchcv/isqrtcovresnet18": "its 256 channels become 32,896 products of two, which the head reads one by one",
    "segmentation/PSPNet-resnet18": "it is built with two stages that its forward leaves out",
    "transformers/wavlm": "eight outputs are viewed as two times four, both written as numbers",
    "monai/FlexibleUNet": "a shortcut adds as many zeros as two numbers of the constructor say",
}
"""The networks that are refused, and why."""

ORDERED = {
    "transformers/pegasus_x": "its positions are waves computed in the forward, each channel's frequency by its number",
}
"""The networks that answer otherwise with their units in another order, and why."""
