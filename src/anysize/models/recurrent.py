"""Recurrent networks over tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from anysize.errors import ModelError
from anysize.models.shapes import positive


class CharLSTM(nn.Module):
    """From tokens (N, T) to the logits of the next token at every position, (N, T, V)."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(out)
        return logits


class TextLSTM(nn.Module):
    """From tokens (N, T), padded at the front, to logits (N, V), computed from the state after the last token."""

    def __init__(self, vocabulary: int, classes: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(out[:, -1])
        return logits


def char_lstm(
    input_shape: Sequence[int], classes: int, embedding: int = 8, hidden: int = 256, layers: int = 2
) -> CharLSTM:
    """Embedding, LSTM layers and the next token's logits at every position.

    Weights have torch's default initialisation.

    Args:
        input_shape: (T,).
        classes: the size of the vocabulary of inputs and outputs.
        embedding: the width of the embedding.
        hidden: the width of each LSTM layer.
        layers: how many.
    """
    _check_tokens("char-lstm", input_shape)
    positive("char-lstm", embedding=embedding, hidden=hidden, layers=layers, classes=classes)
    return CharLSTM(classes, embedding, hidden, layers)


def text_lstm(
    input_shape: Sequence[int],
    classes: int,
    vocabulary: int = 10_000,
    embedding: int = 64,
    hidden: int = 128,
    layers: int = 1,
) -> TextLSTM:
    """Embedding, LSTM layers and one decision after the last token: classifies text.

    Weights have torch's default initialisation.

    Args:
        input_shape: (T,).
        classes: outputs.
        vocabulary: how many tokens there are.
        embedding: the width of the embedding.
        hidden: the width of each LSTM layer.
        layers: how many.
    """
    _check_tokens("text-lstm", input_shape)
    sizes = {"vocabulary": vocabulary, "embedding": embedding, "hidden": hidden, "layers": layers}
    positive("text-lstm", **sizes, classes=classes)
    return TextLSTM(vocabulary, classes, embedding, hidden, layers)


def _check_tokens(name: str, input_shape: Sequence[int]) -> None:
    if len(input_shape) != 1:
        raise ModelError(f"model '{name}' takes token sequences (length,), not {tuple(input_shape)}")
