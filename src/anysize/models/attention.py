"""Blocks of attention, and transformers over patches of an image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anysize.errors import ModelError
from anysize.models.shapes import image, positive


class Block(nn.Module):
    """Attention and two linear layers, each after a norm and with a shortcut.

    Args:
        width: channels of a token.
        heads: heads of the attention.
        hidden: channels between the two linear layers.
        causal: a token attends to itself and to earlier ones alone.
    """

    def __init__(self, width: int, heads: int, hidden: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1 = nn.LayerNorm(width)
        self.queries = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, hidden)
        self.active = nn.GELU()
        self.contract = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm1(x)
        parts = [layer(seen).unflatten(-1, (self.heads, -1)) for layer in (self.queries, self.keys, self.values)]
        queries, keys, values = (part.transpose(1, 2) for part in parts)  # (N, heads, T, width / heads)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        beside: Tensor = self.contract(self.active(self.expand(self.norm2(x))))
        return x + beside


class VisionTransformer(nn.Module):
    """Patches of an image (N, C, H, W) as tokens, blocks of attention, logits (N, V) from a class token."""

    def __init__(
        self, colours: int, patches: int, classes: int, patch: int, width: int, depth: int, heads: int, hidden: int
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(colours, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, patches + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.token, std=0.02)
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)  # (N, T, D)
        first = self.token.expand(patches.shape[0], -1, -1)
        tokens = torch.cat([first, patches], 1) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


def vit_tiny(
    input_shape: Sequence[int],
    classes: int,
    patch: int = 4,
    width: int = 192,
    depth: int = 12,
    heads: int = 3,
    expansion: int = 4,
) -> VisionTransformer:
    """A small vision transformer, DeiT-tiny for 32 x 32 images: patches of 4 x 4, 12 blocks of 192 channels, 3 heads.

    Linear layers and the embedding have torch's default initialisation, the class token and the positions the paper's:
    Touvron et al., "Training data-efficient image transformers & distillation through attention", ICML 2021.

    Args:
        input_shape: (C, H, W); height and width are multiples of the patch.
        classes: outputs.
        patch: height and width of a patch.
        width: channels of a token; a multiple of the heads.
        depth: blocks.
        heads: heads of each attention.
        expansion: channels between the two linear layers of a block, as a multiple of the width.
    """
    colours, height, across = image("vit-tiny", input_shape)
    sizes = {"patch": patch, "width": width, "depth": depth, "heads": heads, "expansion": expansion}
    positive("vit-tiny", **sizes, classes=classes)
    problems = []
    if height % patch or across % patch:
        problems.append(f"patches of {patch} x {patch} do not fill an image of {height} x {across}")
    if width % heads:
        problems.append(f"width {width} is not a multiple of {heads} heads")
    if problems:
        raise ModelError("model 'vit-tiny': " + "; ".join(problems))
    patches = (height // patch) * (across // patch)
    return VisionTransformer(colours, patches, classes, patch, width, depth, heads, expansion * width)
