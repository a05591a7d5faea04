"""A small language model of characters: blocks of causal attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention to earlier characters and two linear layers, each after a norm and with a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.queries = nn.Linear(width, width)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm1(x)
        parts = [layer(seen).unflatten(-1, (self.heads, -1)) for layer in (self.queries, self.keys, self.values)]
        mixed = nn.functional.scaled_dot_product_attention(*(p.transpose(1, 2) for p in parts), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.contract(nn.functional.gelu(self.expand(self.norm2(x))))


class LanguageModel(nn.Module):
    """Logits (N, T, V) of the next character at every position of (N, T) characters."""

    def __init__(self, symbols: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.position)))


def language_model(
    input_shape: tuple[int, ...], classes: int, width: int = 64, depth: int = 2, heads: int = 4
) -> LanguageModel:
    """The language model for texts of `input_shape` characters out of `classes`."""
    return LanguageModel(classes, input_shape[0], width, depth, heads)
