"""Clients of equal shape trained together: one batched operation for all of them instead of one for each.

Small linear networks spend most of a step on calling operations, not on arithmetic. A *stack* joins several clients'
sub-models along a new first axis and is sent as one sub-model; its loss is the method's own under `torch.func.vmap`.
Which clients are stacked depends only on their order, their shapes, their number of samples and `training.stack`, so
every engine that stacks ends with the same bits. The last bits differ from those of clients trained one by one, since
batched operations add in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from anysize.client.accelerators import place
from anysize.client.batches import local_batches
from anysize.client.networks import load_into
from anysize.client.objectives import masked_distillation, masked_objective
from anysize.client.optimizer import optimizer_of
from anysize.client.precision import passes
from anysize.client.step import ClientLoss, TrainingStep
from anysize.client.work import held_classes, learned, perform
from anysize.data import Part, Share
from anysize.errors import ConfigError, MethodError
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import ParameterGroup, SubModel, Ticket, Update
from anysize.methods.training import Batch
from anysize.wire import Json, Tensors

STACK = "stack"
"""The key in a stack's ticket under which its clients' tickets, or their answers, are."""

_CLIP_EPSILON = 1e-6  # as in torch's own clip_grad_norm_


def stacks(sub_models: Iterable[SubModel], limit: int, samples: Callable[[int], int]) -> Iterator[SubModel]:
    """The sub-models in the same order, with neighbours of one kind stacked; others stay alone."""
    for _, alike in groupby(sub_models, lambda sub_model: _kind(sub_model, samples)):
        while together := list(islice(alike, limit)):
            yield stack(together) if len(together) > 1 else together[0]


def _kind(sub_model: SubModel, samples: Callable[[int], int]) -> object:
    """A key that is equal for clients that can be trained together, and different for all others."""
    ticket = sub_model.ticket
    if ticket.job != "train":
        return object()
    shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sub_model.tensors.items())
    return ticket.size, ticket.width, samples(ticket.client), shapes


def stack(sub_models: Sequence[SubModel]) -> SubModel:
    """Several sub-models of equal names and shapes as one, whose ticket holds their tickets.

    >>> tickets = [Ticket(c, round=1, seed=0, size="1.0", width=1.0, rate=0.1) for c in range(2)]
    >>> made = stack([SubModel({"w": torch.full((2,), float(ticket.client))}, ticket) for ticket in tickets])
    >>> made.tensors["w"].tolist(), [part.ticket.client for part in split(made)]
    ([[0.0, 0.0], [1.0, 1.0]], [0, 1])
    """
    tickets = [sub_model.ticket.to_json() for sub_model in sub_models]
    return SubModel(_joined([sub_model.tensors for sub_model in sub_models]), _with(sub_models[0].ticket, tickets))


def split(stacked: SubModel) -> list[SubModel]:
    """The inverse of `stack`: its sub-models, as views."""
    tickets = map(Ticket.from_json, stacked.ticket.more[STACK])
    return [SubModel(_slice(stacked.tensors, i), ticket) for i, ticket in enumerate(tickets)]


def parts_of(update: Update) -> Iterator[Update]:
    """The updates of a stack's clients, or the update itself."""
    notes = update.ticket.more.get(STACK)
    if notes is None:
        yield update
        return
    for i, note in enumerate(notes):
        yield Update.from_json(_slice(update.tensors, i), note)


def perform_any(
    context: Context,
    method: Method[Any],
    sub_model: SubModel,
    share: Callable[[int], Share],
    kept: Mapping[str, Tensor] | None = None,
) -> Update:
    """What `perform` returns for a client, or the stacked updates for a stack of clients."""
    if STACK not in sub_model.ticket.more:
        return perform(context, method, sub_model, share(sub_model.ticket.client), kept)
    own = [share(client.ticket.client).train for client in split(sub_model)]
    return train_stack(context, method, sub_model, own)


def train_stack(context: Context, method: Method[Any], stacked: SubModel, data: Sequence[Part]) -> Update:
    """The stacked updates after local training of all clients at once; the same steps as each would take alone."""
    clients = split(stacked)
    modules = [place(method.build(context, client), context.device).train() for client in clients]
    for layer in modules[0].modules():
        if isinstance(layer, nn.RNNBase):
            layer.forward = partial(unrolled, layer)
    parameters, buffers = stack_module_state(modules)
    received = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    classes = [held_classes(context, part) for part in data]
    mask = _mask(context, classes)
    groups = _stacked_groups(method.groups(modules[0]), modules[0], parameters)
    optimizer = optimizer_of(context.training, groups, stacked.ticket.rate or 0.0)
    loss_of = vmap(_Loss(context, method, modules[0]), in_dims=(0, 0, 0, 0, 0, None if mask is None else 0, None))

    def losses(batch: Batch, number: int) -> Tensor:
        with _explained(method):
            return loss_of(parameters, buffers, batch.x, batch.y, received, mask, number)

    take = TrainingStep(losses, optimizer, context.training.clip, clip_each)
    orders = [local_batches(context, client, part) for client, part in zip(clients, data)]
    sums, seen = torch.zeros(len(clients), device=context.device), 0
    for number, drawn in enumerate(zip(*orders, strict=True)):
        batch = Batch(*(torch.stack(column) for column in zip(*drawn)))
        sums += take(batch, number) * batch.y.shape[1]
        seen += batch.y.shape[1]
        if number == 0:
            _check_gradients(groups, parameters)
    updates = []
    for i, (client, module) in enumerate(zip(clients, modules)):
        load_into(module, _slice({name: tensor.detach() for name, tensor in parameters.items()}, i))
        update = method.pack(module, client)
        told = learned(context, client, len(data[i]), float(sums[i]) / seen, classes[i])
        updates.append(replace(update, **told))
    tensors = {name: tensor.cpu() for name, tensor in _joined([update.tensors for update in updates]).items()}
    return Update(tensors, _with(stacked.ticket, [update.to_json() for update in updates]))


def _with(ticket: Ticket, notes: Sequence[Json]) -> Ticket:
    """The ticket of a stack: one client's, with what is said of or by each of them."""
    return replace(ticket, more={**ticket.more, STACK: list(notes)})


def _refused(count: int) -> int:
    """Raise an error: a choice that each client makes separately cannot be made for all at once."""
    raise MethodError(
        f"training.stack: at every step the method makes one of {count} choices for each client separately, which "
        "stacked clients cannot do; leave training.stack out"
    )


@contextmanager
def _explained(method: Method[Any]) -> Iterator[None]:
    """Turn the failure of an operation that cannot be batched, such as a random choice, into an error that says so."""
    try:
        yield
    except RuntimeError as error:
        if "vmap" not in str(error) and "atching rule" not in str(error):
            raise
        reason = str(error).split("\n", 1)[0]
        raise MethodError(
            f"training.stack: the loss of {type(method).__name__} or of the network cannot be computed for several "
            f"clients at once ({reason}); leave training.stack out"
        ) from error


def _check_gradients(groups: Iterable[ParameterGroup], parameters: Mapping[str, Tensor]) -> None:
    """Refuse a network that bypasses a parameter's registered name: vmap would not swap in the client's parameter."""
    trained = {id(parameter) for group in groups for parameter in group.parameters}
    missed = [name for name, p in parameters.items() if id(p) in trained and p.grad is None]
    if missed:
        raise MethodError(
            f"training.stack: {', '.join(missed)} got no gradient from stacked clients: the network does not use it, "
            "or holds it outside its registered parameters; leave training.stack out"
        )


class _Loss:
    """One client's loss as a function of its tensors and its batch."""

    def __init__(self, context: Context, method: Method[Any], module: nn.Module) -> None:
        self._context = context
        self._method = method
        self._run = passes(context.training, context.device)
        # Inside vmap no tensor says whether it requires a gradient.
        self._trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._called = _Called(module, self._loss)

    def __call__(
        self,
        parameters: Tensors,
        buffers: Tensors,
        x: Tensor,
        y: Tensor,
        received: Tensors,
        mask: Tensor | None,
        number: int,
    ) -> Tensor:
        tensors = {f"module.{name}": tensor for name, tensor in (parameters | buffers).items()}
        loss: Tensor = functional_call(self._called, tensors, (Batch(x, y), received, mask, number))
        return loss

    def _loss(self, module: nn.Module, batch: Batch, received: Tensors, mask: Tensor | None, number: int) -> Tensor:
        task, tricks = self._context.task, self._context.tricks
        loss = ClientLoss(
            method=self._method,
            module=module,
            tricks=tricks,
            received=received,
            objective=masked_objective(task, tricks, mask, self._context.axes.classifier, self._run),
            distillation=masked_distillation(task, mask, self._run),
            random=torch.Generator(),
            choices=_refused,
            trained=self._trained,
        )
        return loss(batch, number)


class _Called(nn.Module):
    """A module whose forward pass is a function of another module, so that `functional_call` can swap its tensors."""

    def __init__(self, module: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *given: Any) -> Tensor:
        return self.function(self.module, *given)


def clip_each(parameters: Iterable[Tensor], limit: float) -> None:
    """Scale each client's gradient in place to a norm of at most `limit`, as `clip_grad_norm_` does for one client."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    count = len(gradients[0])
    squares = torch.stack([gradient.reshape(count, -1).square().sum(1) for gradient in gradients]).sum(0)
    factors = (limit / (squares.sqrt() + _CLIP_EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.reshape(-1, *[1] * (gradient.dim() - 1)))


def unrolled(layer: nn.RNNBase, x: Tensor, start: Any = None) -> tuple[Tensor, Any]:
    """What `layer(x, start)` returns, computed step by step with operations that, unlike torch's, can be batched."""
    x = x.transpose(0, 1) if layer.batch_first else x  # (T, N, inputs)
    directions = 2 if layer.bidirectional else 1
    first = _first_states(layer, x, start)
    last: list[tuple[Tensor, ...]] = []
    for depth in range(layer.num_layers):
        outputs = []
        for direction in range(directions):
            suffix = f"l{depth}" + ("_reverse" if direction else "")
            own = tuple(part[depth * directions + direction] for part in first)
            out, end = _scan(layer, suffix, x.flip(0) if direction else x, own)
            outputs.append(out.flip(0) if direction else out)
            last.append(end)
        x = torch.cat(outputs, -1)
    states = tuple(torch.stack(parts) for parts in zip(*last))
    return x.transpose(0, 1) if layer.batch_first else x, states if len(states) > 1 else states[0]


def _first_states(layer: nn.RNNBase, x: Tensor, start: Any) -> tuple[Tensor, ...]:
    if start is not None:
        return start if isinstance(start, tuple) else (start,)
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size] + [layer.hidden_size] * isinstance(layer, nn.LSTM)
    return tuple(x.new_zeros(rows, x.shape[1], size) for size in sizes)


def _scan(layer: nn.RNNBase, suffix: str, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs (T, N, H) of one layer in one direction, and its last state."""
    biases = [getattr(layer, f"bias_{part}_{suffix}") if layer.bias else None for part in ("ih", "hh")]
    inputs = F.linear(x, getattr(layer, f"weight_ih_{suffix}"), biases[0])  # (T, N, gates * H), at once for all T
    recurrent = getattr(layer, f"weight_hh_{suffix}")
    projection = getattr(layer, f"weight_hr_{suffix}") if layer.proj_size else None
    outputs = []
    for row in inputs.unbind(0):
        state = _CELLS[layer.mode](row, F.linear(state[0], recurrent, biases[1]), state)
        if projection is not None:
            state = (F.linear(state[0], projection), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs), state


def _lstm(row: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (row + hidden).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(row: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (r, z, n), (hr, hz, hn) = row.chunk(3, -1), hidden.chunk(3, -1)
    new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
    return (new + torch.sigmoid(z + hz) * (state[0] - new),)


_CELLS: dict[str, Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": lambda row, hidden, state: (torch.tanh(row + hidden),),
    "RNN_RELU": lambda row, hidden, state: (torch.relu(row + hidden),),
}


def refusals(context: Context, method: Method[Any]) -> list[str]:
    """Why clients of the context's network cannot be stacked, one line per layer or choice; empty if they can."""
    found = [
        f"{name or 'the network'}: {reason}"
        for name, layer in context.template.named_modules()
        if (reason := _obstacle(layer)) is not None
    ]
    if context.tricks.batch_norm == "local":
        found.append('tricks.batch_norm = "local": tensors that stay with a client cannot be stacked')
    if context.tricks.adversarial:
        found.append(f"tricks.adversarial = {context.tricks.adversarial:g}: each client draws separate attacks")
    if not method.reusable:
        found.append(
            f"the method {type(method).__name__}: a client's network depends on more than the shapes of its tensors, "
            "such as a mask, or which networks it trains"
        )
    return found


def _obstacle(layer: nn.Module) -> str | None:
    if isinstance(layer, _ConvNd):
        return "a convolution, which would gain nothing"
    if isinstance(layer, _BatchNorm) and layer.track_running_stats:
        return 'batch-norm with running statistics; set tricks.batch_norm = "batch" or "calibrated"'
    if isinstance(layer, _DropoutNd) and layer.p > 0:
        return "dropout, which draws separately for each client"
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0:
        return "dropout inside the layer, which draws separately for each client"
    return None


def check(context: Context, method: Method[Any]) -> None:
    """Raise a `ConfigError` with every reason why the clients cannot be stacked; do nothing if they can."""
    found = refusals(context, method)
    if found:
        raise ConfigError(
            f"training.stack = {context.training.stack}: clients are stacked for linear and recurrent networks only:\n"
            + "\n".join(f"  - {line}" for line in found)
            + "\nleave training.stack out"
        )


def _mask(context: Context, classes: Sequence[Tensor | None]) -> Tensor | None:
    """One row of booleans per client: the classes that it holds; None if no logit is masked."""
    held = [own.to(context.device) for own in classes if own is not None]
    if not context.tricks.masked_loss or not held or all(bool(own.all()) for own in held):
        return None
    return torch.stack(held)


def _stacked_groups(
    groups: Iterable[ParameterGroup], module: nn.Module, parameters: Mapping[str, Any]
) -> list[ParameterGroup]:
    """The method's parameter groups over the stacked parameters."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [replace(group, parameters=[parameters[names[id(p)]] for p in group.parameters]) for group in groups]


def _joined(all_tensors: Sequence[Mapping[str, Tensor]]) -> Tensors:
    return {name: torch.stack([tensors[name] for tensors in all_tensors]) for name in all_tensors[0]}


def _slice(tensors: Mapping[str, Tensor], i: int) -> Tensors:
    return {name: tensor[i] for name, tensor in tensors.items()}
