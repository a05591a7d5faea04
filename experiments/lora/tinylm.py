"""A small language model of characters: blocks of causal attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from anysize.models.attention import Block


class LanguageModel(nn.Module):
    """Logits (N, T, V) of the next character at every position of (N, T) characters."""

    def __init__(self, symbols: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 4 * width, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(x) + self.position)))


def language_model(
    input_shape: tuple[int, ...], classes: int, width: int = 64, depth: int = 2, heads: int = 4
) -> LanguageModel:
    """The language model for texts of `input_shape` characters out of `classes`."""
    return LanguageModel(classes, input_shape[0], width, depth, heads)
