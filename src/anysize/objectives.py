"""The task's loss with the chosen tricks: the one place that assembles a client's objective.

A method calls `step.objective` once per pass and adds the terms of its paper; it never calls a loss directly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from anysize.attacks import Attack, Loss, pgd
from anysize.elastic.norm import noisy
from anysize.errors import MethodError
from anysize.tasks import Task


@dataclass(frozen=True)
class Tricks:
    """Options that every method shares; a method's `paper` lists those that its authors used.

    Attributes:
        masked_loss: logits of classes that a client does not hold are set to zero in its loss (HeteroFL).
        classwise_head: a row of the classifier is averaged only over clients that hold its class (HeteroFL).
        batch_norm: which statistics normalise, and which are kept. "tracked": running statistics, averaged with the
            weights; "calibrated": the batch's statistics in training, estimated anew for tests; "batch": the batch's
            statistics in training and in tests; "local": norm layers never leave the client.
        weighting: a client's weight in an average: its number of samples, or one.
        rescaled_init: networks narrower than the full one start with parts of its weights, at the scale of the full
            width (Split-Mix); if off, at the scale of an initialisation at their own width. It does not change methods
            that start only from the full network.
        proximal: FedProx's mu; 0 is off.
        proximal_form: the squared distance as a "sum" over all entries (FedProx) or the sum of each tensor's "mean"
            (FedMAX's code).
        max_entropy: FedMAX's beta, which pulls the classifier's inputs towards the uniform distribution; 0 is off.
        server_momentum: momentum of the server's step; 0 is off.
        adversarial: the weight of the loss on inputs under attack; the loss on clean inputs has the rest (Split-Mix,
            Eq. 1); 0 is off.
        attack_epsilon: how far the attack may move any entry of an input.
        attack_step: how far one step of the attack moves it.
        attack_steps: how many steps the attack takes.
    """

    masked_loss: bool = False
    classwise_head: bool = False
    batch_norm: Literal["batch", "tracked", "calibrated", "local"] = "tracked"
    weighting: Literal["samples", "clients"] = "samples"
    rescaled_init: bool = True
    proximal: float = 0.0
    proximal_form: Literal["sum", "mean"] = "sum"
    max_entropy: float = 0.0
    server_momentum: float = 0.0
    adversarial: float = 0.0
    attack_epsilon: float = 8 / 255
    attack_step: float = 2 / 255
    attack_steps: int = 7

    def chosen(self, options: Mapping[str, Any]) -> Tricks:
        """These tricks, with the values of `options` that are not None in place of theirs."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


class Batch(NamedTuple):
    """What the network receives, and what it should answer."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Step:
    """One local step as a method's `loss` sees it.

    Attributes:
        number: 0 for the first step of this client in this round.
        generator: for the method's random choices, derived from (seed, round, client).
        received: the tensors as they arrived, by the trained module's names.
        objective: the task's loss of one pass, with all chosen tricks.
        distillation: the loss of one pass against another network's outputs, masked as the objective is.
        choices: if given, `choose` calls it instead of the generator; counting costs tries every choice.
        attack: for methods that weigh the loss under attack themselves: a function of the network, the inputs and the
            loss (a function of the inputs) that returns attacked inputs, as strong as the tricks say.
    """

    number: int
    generator: torch.Generator
    received: Mapping[str, Tensor]
    objective: Callable[[nn.Module, Batch], Tensor]
    distillation: Callable[[nn.Module, Batch, Tensor], Tensor] | None = None
    choices: Callable[[int], int] | None = None
    attack: Callable[[nn.Module, Tensor, Loss], Tensor] | None = None

    def choose(self, count: int) -> int:
        """One of `count` choices, from 0, each with the same probability."""
        if self.choices is not None:
            return self.choices(count)
        return int(torch.randint(count, (), generator=self.generator))


def make_objective(
    task: Task,
    tricks: Tricks,
    classes: Tensor | None,
    random: torch.Generator | None = None,
    classifier: str | None = None,
) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of one pass: the task's, if chosen masked to the client's classes, with the entropy term, under attack.

    Args:
        task: what is learned.
        tricks: the chosen tricks.
        classes: for each class, whether the client holds it; None if the task has no classes.
        random: draws the attack's random start.
        classifier: the dotted name of the layer that produces the class axis, for the entropy term.
    """
    clean = masked_objective(task, tricks, _mask(tricks, classes), classifier)
    return adversarial(clean, tricks, random or torch.Generator()) if tricks.adversarial else clean


def masked_objective(
    task: Task, tricks: Tricks, mask: Tensor | None, classifier: str | None = None
) -> Callable[[nn.Module, Batch], Tensor]:
    """The task's loss of one clean pass, masked if there is a mask, with the entropy term if chosen."""
    seen = _seen(task, mask)

    def plain(module: nn.Module, batch: Batch) -> Tensor:
        return task.loss(seen(module(batch.x)), batch.y)

    return with_entropy(plain, tricks.max_entropy, classifier) if tricks.max_entropy else plain


def with_entropy(
    plain: Callable[[nn.Module, Batch], Tensor], beta: float, classifier: str | None
) -> Callable[[nn.Module, Batch], Tensor]:
    """FedMAX, Eq. (3): the loss plus beta times the distance of the classifier's inputs from uniform."""

    def objective(module: nn.Module, batch: Batch) -> Tensor:
        layer = classifier_in(module, classifier)
        entered: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
        try:
            loss = plain(module, batch)
        finally:
            handle.remove()
        axis = 1 if isinstance(layer, _ConvNd) else -1
        return loss + beta * torch.stack([entropy_gap(active, axis) for active in entered]).sum()

    return objective


def adversarial(
    clean: Callable[[nn.Module, Batch], Tensor], tricks: Tricks, random: torch.Generator
) -> Callable[[nn.Module, Batch], Tensor]:
    """Split-Mix, Eq. (1): (1 - lambda_n) L(f(x), y) + lambda_n max L(f(x + delta), y).

    In a network with dual batch-norm the second term goes through the noised branch: that is Algorithm 4.
    """
    attack, weight = make_attack(tricks, random), tricks.adversarial

    def objective(module: nn.Module, batch: Batch) -> Tensor:
        branch = noisy(module)
        # The attack comes first, so that its memory is free again when the training passes begin.
        changed = attack(branch, batch.x, lambda x: clean(branch, Batch(x, batch.y)))
        loss = weight * clean(branch, Batch(changed, batch.y))
        return loss if weight == 1 else loss + (1 - weight) * clean(module, batch)

    return objective


def make_attack(tricks: Tricks, random: torch.Generator) -> Callable[[nn.Module, Tensor, Loss], Tensor]:
    """The attack of the strength in `tricks`, as a function of the network, its inputs and the loss to raise."""
    strength = Attack(tricks.attack_epsilon, tricks.attack_step, tricks.attack_steps)
    return lambda module, x, loss: pgd(module, x, loss, strength, random)


def classifier_in(module: nn.Module, name: str | None) -> nn.Module:
    """The classifier of a network, or of a module around it; raises an error if there is none.

    The name of a layer inside a block may have the same ending, so the outermost match counts.

    >>> net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Identity()), nn.Flatten(), nn.Linear(3, 2))
    >>> classifier_in(net, "2"), classifier_in(nn.Sequential(net), "2")
    (Linear(in_features=3, out_features=2, bias=True), Linear(in_features=3, out_features=2, bias=True))
    """
    if name is None:
        raise MethodError("tricks.max_entropy needs one layer that produces the classes; this task or model has none")
    places: dict[int, list[nn.Module]] = {}
    for path, part in module.named_modules():
        if path == name or path.endswith(f".{name}"):
            places.setdefault(path.count("."), []).append(part)
    found = places[min(places)] if places else []
    if len(found) != 1:
        count = "none" if not found else str(len(found))
        raise MethodError(
            f"tricks.max_entropy needs one layer that produces the classes; this network has {count} called '{name}'"
        )
    return found[0]


def entropy_gap(active: Tensor, axis: int = -1) -> Tensor:
    """FedMAX, Eq. (3): KL(uniform || softmax(a)), as the mean over all entries, as in the authors' code.

    >>> entropy_gap(torch.zeros(2, 3)).item()
    0.0
    """
    uniform = torch.full_like(active, 1.0 / active.shape[axis])
    return functional.kl_div(active.log_softmax(axis), uniform, reduction="none").mean()


def make_distillation(
    task: Task, tricks: Tricks, classes: Tensor | None
) -> Callable[[nn.Module, Batch, Tensor], Tensor]:
    """The loss of one pass against a teacher's outputs for the same batch, which receive no gradient.

    Args:
        task: what is learned.
        tricks: the chosen tricks; a masked loss masks both teacher and student.
        classes: for each class, whether the client holds it; None if the task has no classes.
    """
    return masked_distillation(task, _mask(tricks, classes))


def masked_distillation(task: Task, mask: Tensor | None) -> Callable[[nn.Module, Batch, Tensor], Tensor]:
    """The loss of one pass against a teacher, over the classes of `mask` if there is one."""
    seen = _seen(task, mask)

    def distillation(module: nn.Module, batch: Batch, teacher: Tensor) -> Tensor:
        return task.distillation(seen(module(batch.x)), seen(teacher.detach()))

    return distillation


def _mask(tricks: Tricks, classes: Tensor | None) -> Tensor | None:
    """The classes to which the loss is masked; None if it sees all."""
    return classes if tricks.masked_loss and classes is not None and not bool(classes.all()) else None


def _seen(task: Task, mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A function that gives the part of an output that the loss sees."""
    return lambda output: output if mask is None else masked(output, mask, task.class_axis)


def masked(output: Tensor, classes: Tensor, class_axis: int | None) -> Tensor:
    """HeteroFL, section 3: the logits of absent classes are zero, so that no gradient reaches their rows.

    >>> masked(torch.tensor([[3.0, 5.0]]), torch.tensor([True, False]), -1).tolist()
    [[3.0, 0.0]]
    """
    assert class_axis is not None
    shape = [1] * output.dim()
    shape[class_axis] = -1
    return output.masked_fill(~classes.reshape(shape), 0.0)


def proximal(
    module: nn.Module, received: Mapping[str, Tensor], tricks: Tricks, trained: Collection[str] | None = None
) -> Tensor:
    """FedProx, Eq. (2): mu / 2 times the squared distance from the received parameters.

    Args:
        module: the module in training.
        received: its parameters as they arrived, by name.
        tricks: the strength mu and the form of the distance.
        trained: names of the parameters that are trained; by default those that require a gradient.
    """
    total: Tensor | float = 0.0
    for name, parameter in module.named_parameters():
        if parameter.requires_grad if trained is None else name in trained:
            square = (parameter - received[name]).square()
            total = total + (square.sum() if tricks.proximal_form == "sum" else square.mean())
    return torch.as_tensor(total * (tricks.proximal / 2))
