"""What a size costs: parameters, multiply-adds, activation memory, bytes on the wire. Nothing else computes a cost.

Costs are counted on the meta device, from the same messages and networks that clients get, by torch's counter (see
`operations`) and autograd's hooks. Nothing is allocated or estimated, and all methods are counted in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anysize.client.compression import bytes_up
from anysize.client.step import client_loss
from anysize.client.work import needs_calibration
from anysize.cost.memory import Scratch, process_bytes
from anysize.cost.operations import FusedAttention, counter
from anysize.cost.recurrence import FewSteps
from anysize.cost.shapes import Remembered
from anysize.elastic.fast import fast, layout
from anysize.elastic.norm import attach, collect, norm_tensors
from anysize.elastic.skeleton import hollow, named_tensors
from anysize.elastic.tracing import values
from anysize.elastic.tracing.forward import unread_masks, without_data
from anysize.elastic.tracing.values import KnownValues, MetaDevice
from anysize.inputs import mapped
from anysize.methods.base import Method
from anysize.methods.capabilities import Masked, offered_sizes
from anysize.methods.context import Context
from anysize.methods.kit import trained_parameters
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch
from anysize.wire import size_bytes

Found = TypeVar("Found")


@dataclass(frozen=True)
class Cost:
    """The cost of one size.

    Attributes:
        parameters: what a client trains and sends.
        macs: multiply-adds of one forward pass of the finished network, per sample, zeros included: a dense
            multiplication takes its time whatever the numbers are.
        nonzero_macs: the multiply-adds whose weight is not zero; only hardware for sparse networks skips the others.
        training_macs: multiply-adds of one `loss` and its backward pass, per sample, at the training batch size; the
            mean if the method draws a network for every batch.
        activation_bytes: what a training step holds for its backward pass besides parameters, at the training batch
            size; the maximum if the method draws.
        bytes_down: the message to a client in a round.
        bytes_up: the message back.
        memory_bytes: what a device's process takes at its peak above an idle one, at the training batch size.
        inference_bytes: parameters and buffers of the finished network as it ships, batch-norm statistics included.
    """

    parameters: int
    macs: int
    training_macs: int
    activation_bytes: int
    bytes_down: int
    bytes_up: int
    inference_bytes: int
    nonzero_macs: int = 0
    memory_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Both messages of a round."""
        return self.bytes_down + self.bytes_up

    def units(self) -> dict[str, float]:
        """Every unit that a budget can name."""
        return {**asdict(self), "bytes": self.bytes}


def measure(context: Context, method: Method[Any], state: Any, size: Size, example: Batch) -> Cost:
    """The cost of a client of that size.

    Args:
        context: the server's.
        method: the method.
        state: any state of it.
        size: of the client.
        example: a batch of the training batch size, real or meta; only its shapes and types matter.
    """
    message = _received(context, method, state, size, example)
    finished = method.customize(context, state, trained(method, context, size))
    network, x = hollow(finished, constants=False), example.x.to("meta")
    macs = forward_macs(network, x)
    return Cost(
        **training_cost(context, method, message, example),
        macs=macs,
        inference_bytes=shipped_bytes(context, network),
        nonzero_macs=macs - skipped_macs(finished, network, x),
    )


def tried(context: Context, method: Method[Any], state: Any, size: Size, example: Batch) -> tuple[int, int]:
    """(parameters, multiply-adds of a forward pass) of a client of that size, as `measure` counts them.

    The client takes one training step with two blank samples, so that any fault of the network or the method shows. To
    count what a step costs would take ten times as long.
    """
    message = _received(context, method, state, size, example)
    module = layout(method.build(context, message))
    x = mapped(example.x, _two_blank)
    batch = Batch(x, torch.zeros(2, *example.y.shape[1:], dtype=example.y.dtype))
    once = replace(context, tricks=replace(context.tricks, attack_steps=1))
    loss = client_loss(once, method, module.train(), choices=lambda count: 0)
    loss(batch, 0).backward()  # type: ignore[no-untyped-call]
    method.pack(module, message)
    network = hollow(method.customize(context, state, trained(method, context, size)), constants=False)
    return _parameters(method, module, message), forward_macs(network, mapped(batch.x, values.on_meta))


def _two_blank(one: Tensor) -> Tensor:
    """Two samples of an example's input: the first one's integers, such as those of a mask, or zeros."""
    known = values.value_of(one)
    return torch.zeros(2, *one.shape[1:], dtype=one.dtype) if known is None else known[:1].repeat_interleave(2, 0)


def _received(context: Context, method: Method[Any], state: Any, size: Size, example: Batch) -> SubModel:
    """What a client of that size receives in the first round."""
    client = Client(id=0, position=0, size=size, round=1, samples=len(example.x), seed=context.seed)
    message = method.extract(context, state, client)
    return replace(message, ticket=replace(message.ticket, rate=0.1))


def _parameters(method: Method[Any], module: nn.Module, meta: SubModel) -> int:
    return method.trained(module, meta) if isinstance(method, Masked) else trained_parameters(module)


def finished_cost(network: nn.Module, example: Tensor) -> dict[str, int]:
    """What a finished network costs where it runs, by the names of `Cost`.

    Args:
        network: with fixed statistics.
        example: a batch of inputs on the meta device.
    """
    bare = hollow(network, constants=False)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {"parameters": parameters, "macs": forward_macs(bare, example), "inference_bytes": own_bytes(network)}


def training_cost(context: Context, method: Method[Any], sub_model: SubModel, example: Batch) -> dict[str, int]:
    """The costs that a client can compute from the sub-model it receives, by the names of `Cost`."""
    meta = on_meta(sub_model)
    module, answer = answered(context, method, meta)
    batch = Batch(fast(example.x.to("meta")), example.y.to("meta"))
    with Scratch(module) as scratch:
        training, held = step_cost(context, method, module, batch)
    return {
        "parameters": _parameters(method, module, meta),
        "training_macs": training // len(batch.x),
        "activation_bytes": held,
        "memory_bytes": process_bytes(
            context.training, own_bytes(module), len(dict(named_tensors(module))), held, scratch.total
        ),
        "bytes_down": size_bytes(meta.tensors, meta.ticket.to_json()),
        "bytes_up": bytes_up(context, replace(answer, **_measured(context))),
    }


def answered(context: Context, method: Method[Any], meta: SubModel) -> tuple[nn.Module, Update]:
    """The network that a client trains and the update that it returns, both on the meta device."""
    module = layout(hollow(method.build(context, meta), constants=False))
    stays = set(norm_tensors(module)) if context.tricks.batch_norm == "local" else set()
    packed = method.pack(module, meta)
    sent = {name: tensor for name, tensor in packed.tensors.items() if name not in stays}
    return module, replace(packed, tensors=sent)


def on_meta(sub_model: SubModel) -> SubModel:
    """The sub-model without its numbers."""
    return replace(sub_model, tensors={name: tensor.to("meta") for name, tensor in sub_model.tensors.items()})


def own_bytes(network: nn.Module) -> int:
    """The bytes of a network's parameters and buffers.

    >>> own_bytes(nn.Linear(2, 3))
    36
    """
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(network))


def shipped_bytes(context: Context, network: nn.Module) -> int:
    """The bytes of a finished network's tensors as they are shipped.

    A network that normalises by the batch in training gets fixed statistics before it ships, so it is then as large as
    one that tracked them.
    """
    if needs_calibration(context):
        network = attach(hollow(network), collect(network, []))
    return own_bytes(network)


def trained(method: Method[Any], context: Context, size: Size) -> Size:
    """The largest size of the method that is not above `size`: the one that a device of that size runs."""
    offered = offered_sizes(method, context)
    fitting = [s for s in offered if s.width <= size.width]
    exact = [s for s in fitting if s.label == size.label]
    return (exact or fitting or list(offered[:1]))[-1]


def forward_macs(network: nn.Module, x: Tensor) -> int:
    """Multiply-adds of one forward pass per sample of `x`."""
    network.eval()
    with torch.no_grad():
        return _count(lambda: network(x), network, without_data)[0] // len(x)


def layer_macs(network: nn.Module, x: Tensor) -> dict[str, int]:
    """Multiply-adds of one forward pass per sample of `x` by the module that makes them."""
    network.eval()
    # Known values are innermost here too.
    with Remembered(), counter() as found, FusedAttention(), without_data(), torch.no_grad():
        network(x)
    own = type(network).__name__  # the counter's names begin with the type of the called module
    counts = {name: sum(operations.values()) // (2 * len(x)) for name, operations in found.get_flop_counts().items()}
    return {name.removeprefix(f"{own}."): count for name, count in counts.items() if name.startswith(f"{own}.")}


def skipped_macs(finished: nn.Module, network: nn.Module, x: Tensor) -> int:
    """The multiply-adds per sample whose weight in the finished network is zero; `network` is its hollow copy."""
    zeros = {path: share for path, part in finished.named_modules() if (share := zero_share(part))}
    if not zeros:
        return 0
    by_layer = layer_macs(network, x)
    return sum(round(by_layer.get(path, 0) * share) for path, share in zeros.items())


def zero_share(layer: nn.Module) -> float:
    """Which part of a layer's weight is zero; 0 for modules without a weight.

    >>> zero_share(nn.ReLU())
    0.0
    """
    weight = layer._parameters.get("weight")
    if weight is None or weight.dim() < 2 or weight.is_meta:
        return 0.0
    return 1 - int(weight.count_nonzero()) / weight.numel()


def step_cost(context: Context, method: Method[Any], module: nn.Module, batch: Batch) -> tuple[int, int]:
    """(multiply-adds, bytes held for the backward pass) of one loss and its backward pass.

    If the method draws at every step, all choices count: the mean of the multiply-adds, the maximum of the bytes.
    """
    module.train()
    found = for_every_choice(lambda choices: _one_step(context, method, module, batch, choices))
    return sum(macs for macs, _ in found) // len(found), max(held for _, held in found)


def _one_step(
    context: Context, method: Method[Any], module: nn.Module, batch: Batch, choices: Callable[[int], int]
) -> tuple[int, int]:
    loss = client_loss(context, method, module, choices=choices)
    with unread_masks(), _OnMeta(module) if batch.x.is_meta else nullcontext():
        return _count(lambda: loss(batch, 0).backward(), module)  # type: ignore[no-untyped-call]


def for_every_choice(work: Callable[[Callable[[int], int]], Found]) -> list[Found]:
    """What `work` finds with each choice that a method can draw at a step; once for a method that draws nothing.

    >>> for_every_choice(lambda choose: choose(3)), for_every_choice(lambda choose: "no choice")
    ([0, 1, 2], ['no choice'])
    """
    choices = _Choices()
    found = [work(choices)]
    while choices.taken + 1 < choices.count:
        choices.taken += 1
        found.append(work(choices))
    return found


class _OnMeta:
    """While active, tensors made in a module's forward are on the meta device; those that a method makes are not."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._depth = 0
        self._device = MetaDevice()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for part in self._module.modules():
            self._handles.append(part.register_forward_pre_hook(self._begin))
            self._handles.append(part.register_forward_hook(self._end, always_call=True))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._depth == 0:
            self._device.__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1

    def _end(self, part: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._device.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _count(
    work: Callable[[], object],
    module: nn.Module,
    known: Callable[[], AbstractContextManager[object]] = lambda: KnownValues(largest_float=1024),
) -> tuple[int, int]:
    """(multiply-adds, bytes held) of `work`; the counter counts each multiply-add as two operations.

    Networks may read what depends on sizes and constants alone: inside the other modes its values are `known`, also of
    operations that are remembered.
    """

    def counted(work: Callable[[], object]) -> tuple[int, int]:
        with Remembered(), counter() as found, HeldBytes(module) as held, FusedAttention(), known():
            work()
        return int(found.get_total_flops()), held.total

    with FewSteps() as few:
        operations, held = counted(work)
    more, longer = few.left_out(counted)
    return (operations + more) // 2, held + longer


class _Choices:
    """Returns a given choice, and remembers how many choices there were."""

    def __init__(self) -> None:
        self.taken = 0
        self.count = 1

    def __call__(self, count: int) -> int:
        self.count = count
        return self.taken


class HeldBytes:
    """Counts the distinct storages that autograd saves for the backward pass, except parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
        self._held: dict[int, Tensor] = {}  # keeps the tensors alive, so that no address is counted twice
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def _save(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in self._own:
            self._held[address] = tensor
        return tensor

    @property
    def total(self) -> int:
        """Bytes held."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._held.values())

    def __enter__(self) -> HeldBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def _measured(context: Context) -> dict[str, Any]:
    """What a client tells besides its tensors, at its usual length."""
    classes = [1] * context.classes if context.tricks.classwise_head and context.classes is not None else None
    return {"samples": 1000 if "samples" in context.tells else None, "loss": 0.123456789, "classes": classes}
