"""The task's loss with the chosen tricks: the one place where a client's objective is put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from anysize.client.attacks import Attack, pgd
from anysize.client.precision import Pass, plain, single
from anysize.elastic.norm import noisy
from anysize.errors import MethodError
from anysize.methods.training import Batch, Loss, Tricks
from anysize.tasks import Task


def make_objective(
    task: Task,
    tricks: Tricks,
    classes: Tensor | None,
    random: torch.Generator | None = None,
    classifier: str | None = None,
    run: Pass = plain,
) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of one pass: the task's loss with the chosen tricks (masked classes, entropy term, attack).

    Args:
        task: what is learned.
        tricks: the chosen tricks.
        classes: for each class, whether the client holds it; None if the task has no classes.
        random: draws the attack's random start.
        classifier: the dotted name of the layer that produces the class axis, for the entropy term.
        run: runs the network.
    """
    clean = masked_objective(task, tricks, _mask(tricks, classes), classifier, run)
    return adversarial(clean, tricks, random or torch.Generator()) if tricks.adversarial else clean


def masked_objective(
    task: Task, tricks: Tricks, mask: Tensor | None, classifier: str | None = None, run: Pass = plain
) -> Callable[[nn.Module, Batch], Tensor]:
    """The task's loss of one clean pass, masked if there is a mask, with the entropy term if chosen."""
    seen = _seen(task, mask)

    def simple(module: nn.Module, batch: Batch) -> Tensor:
        return task.loss(seen(run(module, batch.x)), batch.y)

    return with_entropy(simple, tricks.max_entropy, classifier) if tricks.max_entropy else simple


def with_entropy(
    simple: Callable[[nn.Module, Batch], Tensor], beta: float, classifier: str | None
) -> Callable[[nn.Module, Batch], Tensor]:
    """FedMAX, Eq. (3): the loss plus beta times the distance of the classifier's inputs from uniform."""

    def objective(module: nn.Module, batch: Batch) -> Tensor:
        layer = classifier_in(module, classifier)
        entered: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
        try:
            loss = simple(module, batch)
        finally:
            handle.remove()
        axis = 1 if isinstance(layer, _ConvNd) else -1
        return loss + beta * torch.stack([entropy_gap(single(active), axis) for active in entered]).sum()

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
    task: Task, tricks: Tricks, classes: Tensor | None, run: Pass = plain
) -> Callable[[nn.Module, Batch, Tensor], Tensor]:
    """The loss of one pass against a teacher's outputs for the same batch, which receive no gradient.

    Args:
        task: what is learned.
        tricks: the chosen tricks; a masked loss masks both teacher and student.
        classes: for each class, whether the client holds it; None if the task has no classes.
        run: runs the network.
    """
    return masked_distillation(task, _mask(tricks, classes), run)


def masked_distillation(
    task: Task, mask: Tensor | None, run: Pass = plain
) -> Callable[[nn.Module, Batch, Tensor], Tensor]:
    """The loss of one pass against a teacher, over the classes of `mask` if there is one."""
    seen = _seen(task, mask)

    def distillation(module: nn.Module, batch: Batch, teacher: Tensor) -> Tensor:
        return task.distillation(seen(run(module, batch.x)), seen(teacher.detach()))

    return distillation


def _mask(tricks: Tricks, classes: Tensor | None) -> Tensor | None:
    """The classes to which the loss is masked; None if it sees all."""
    return classes if tricks.masked_loss and classes is not None and not bool(classes.all()) else None


def _seen(task: Task, mask: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A function that returns the entries of an output that the loss sees."""
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
