"""What is learned: the loss, the metrics, and which axis of the output counts classes.

Metrics are kept as sums and counts, so that those of batches, clients and devices can be merged exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from anysize.config.own_code import by_name
from anysize.errors import ConfigError

Sums = dict[str, float]

IGNORED = -100
"""The target of positions that do not count, such as padding; the same number as in torch and transformers."""


class Task(ABC):
    """A loss to minimise and the metrics to report.

    Attributes:
        metric: the name of the main metric, a key of what `metrics` returns.
        higher_is_better: whether a larger metric is better.
        class_axis: the axis of the output that counts classes, or None if there is none; class-wise tricks need it.
    """

    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True
    class_axis: ClassVar[int | None] = None

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar."""

    def distillation(self, output: Tensor, teacher: Tensor) -> Tensor:
        """The mean loss of a batch against another network's outputs, a scalar.

        With classes: the cross-entropy between both networks' probabilities; without: the loss, with the teacher's
        output as the target.
        """
        if self.class_axis is None:
            return self.loss(output, teacher)
        odds = output.log_softmax(self.class_axis) * teacher.softmax(self.class_axis)
        return -odds.sum(self.class_axis).mean()

    @abstractmethod
    def sums(self, output: Tensor, target: Tensor) -> Sums:
        """Sums over a batch from which `metrics` computes everything, including "count"."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The metrics of all batches whose sums were added up, including "loss"."""


@dataclass(frozen=True)
class Classification(Task):
    """One class per sample: cross-entropy and accuracy.

    >>> task = Classification()
    >>> task.metrics(task.sums(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])))["accuracy"]
    0.5
    """

    metric = "accuracy"
    class_axis = -1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    def sums(self, output: Tensor, target: Tensor) -> Sums:
        return {
            "count": float(len(target)),
            "correct": float((output.argmax(-1) == target).sum()),
            "loss": float(F.cross_entropy(output, target, reduction="sum")),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"accuracy": sums["correct"] / sums["count"], "loss": sums["loss"] / sums["count"]}


@dataclass(frozen=True)
class NextToken(Task):
    """The next symbol at every position: cross-entropy, perplexity and accuracy per symbol."""

    metric = "perplexity"
    higher_is_better = False
    class_axis = -1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    def sums(self, output: Tensor, target: Tensor) -> Sums:
        logits, symbols = output.flatten(0, -2), target.flatten()
        return {
            "count": float((symbols != IGNORED).sum()),
            "correct": float((logits.argmax(-1) == symbols).sum()),
            "loss": float(F.cross_entropy(logits, symbols, reduction="sum")),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        count = max(sums["count"], 1.0)
        loss = sums["loss"] / count
        return {"perplexity": exp(min(loss, 700.0)), "accuracy": sums["correct"] / count, "loss": loss}


@dataclass(frozen=True)
class Seq2SeqLM(NextToken):
    """A text for a text: the next token of the target, given the source; targets of -100 do not count.

    >>> task, uniform = Seq2SeqLM(), torch.zeros(1, 3, 4)
    >>> round(task.metrics(task.sums(uniform, torch.tensor([[1, 2, -100]])))["perplexity"], 3)
    4.0
    """

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        total = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")
        return total / (target != IGNORED).sum().clamp(min=1)  # a batch in which no target counts teaches nothing


@dataclass(frozen=True)
class CausalLM(Seq2SeqLM):
    """The next token at every position, with the tokens themselves as targets; those of -100 do not count."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output[:, :-1], target[:, 1:])

    def sums(self, output: Tensor, target: Tensor) -> Sums:
        return super().sums(output[:, :-1], target[:, 1:])


@dataclass(frozen=True)
class MaskedLM(Seq2SeqLM):
    """The tokens that were masked; targets of -100 were not."""


@dataclass(frozen=True)
class TokenClassification(Seq2SeqLM):
    """One class per token: cross-entropy and accuracy per token; targets of -100 do not count."""

    metric = "accuracy"
    higher_is_better = True

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = super().metrics(sums)
        return {name: found[name] for name in ("accuracy", "loss")}


@dataclass(frozen=True)
class Regression(Task):
    """Real targets: mean squared error, and R2 as the metric."""

    metric = "r2"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target.reshape(output.shape).to(output.dtype))

    def sums(self, output: Tensor, target: Tensor) -> Sums:
        truth = target.reshape(output.shape).double()
        return {
            "count": float(truth.numel()),
            "squared": float((output.double() - truth).square().sum()),
            "target": float(truth.sum()),
            "target_squared": float(truth.square().sum()),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["squared"] / sums["count"]
        square = sums["target_squared"] / sums["count"]
        variance = square - (sums["target"] / sums["count"]) ** 2
        # If all targets are equal, the variance is only a rounding error: there is nothing to explain.
        return {"r2": 1 - loss / variance if variance > 1e-13 * square else 0.0, "loss": loss}


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any number of labels per sample (targets of zeros and ones): binary cross-entropy and micro-averaged F1."""

    metric = "f1"
    class_axis = -1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, target.to(output.dtype))

    def distillation(self, output: Tensor, teacher: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, teacher.sigmoid())

    def sums(self, output: Tensor, target: Tensor) -> Sums:
        said, true = output > 0, target > 0
        return {
            "count": float(target.numel()),
            "hits": float((said & true).sum()),
            "said": float(said.sum()),
            "true": float(true.sum()),
            "loss": float(F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="sum")),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {
            "f1": 2 * sums["hits"] / max(sums["said"] + sums["true"], 1.0),
            "loss": sums["loss"] / sums["count"],
        }


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "next-token": NextToken,
    "causal-lm": CausalLM,
    "masked-lm": MaskedLM,
    "seq2seq-lm": Seq2SeqLM,
    "token-classification": TokenClassification,
    "regression": Regression,
    "multilabel": MultiLabel,
}


def task(name: str) -> Task:
    """The task of that name, or a user's by "module:Class".

    >>> task("classification").metric
    'accuracy'
    """
    kind = TASKS[name] if name in TASKS else by_name(name, "task", TASKS)
    try:
        made = kind()
    except TypeError as error:
        raise ConfigError(f"task '{name}': {error}") from None
    if not isinstance(made, Task):
        raise ConfigError(f"task.name = '{name}' is a {type(made).__name__}, not an anysize.Task")
    return made


def add(total: Sums, more: Mapping[str, float]) -> None:
    """Add `more` to `total` in place."""
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value


def label_set(target: Tensor, classes: int) -> Tensor:
    """Which classes occur in `target`: a boolean per class.

    >>> label_set(torch.tensor([2, 0, 2]), 4).tolist()
    [True, False, True, False]
    """
    return label_counts(target, classes)[:classes] > 0


def label_counts(target: Tensor, classes: int) -> Tensor:
    """How often each class occurs in `target`; targets of -100 do not count.

    >>> label_counts(torch.tensor([[2, 0], [2, -100]]), 4).tolist()
    [1, 0, 2, 0]
    """
    return torch.bincount(target[target != IGNORED].long(), minlength=classes)
