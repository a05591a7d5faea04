"""Networks that a process builds once and fills again with another client's tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anysize.client.accelerators import place
from anysize.elastic.fast import layout
from anysize.elastic.norm import norm_tensors
from anysize.elastic.skeleton import named_tensors
from anysize.methods.base import Method
from anysize.methods.context import Context
from anysize.methods.messages import SubModel
from anysize.wire import Tensors


def built(context: Context, method: Method[Any], sub_model: SubModel, fixed: bool = False) -> nn.Module:
    """The network of the sub-model; reuses a network of the same shapes and fills it with the new tensors.

    Args:
        context: the client's context; it holds the networks that were built before.
        method: the method.
        sub_model: what the client received.
        fixed: whether batch-norm statistics will be attached to it; such networks are stored separately.
    """
    if not method.reusable:
        return place(layout(method.build(context, sub_model)), context.device)
    shapes = frozenset((name, tensor.shape) for name, tensor in sub_model.tensors.items())
    key = (id(method), sub_model.width, sub_model.finished, fixed, shapes)
    if key not in context.built:
        module = place(layout(method.build(context, sub_model)), context.device)
        # Only a network that holds the message's own tensors can be loaded with another message's. One whose weights
        # are made from them, such as products of factors, would keep the weights it was built with. What is frozen
        # beside them is every client's.
        frozen = set() if context.base is None else frozen_tensors(module)
        if {name for name, _ in named_tensors(module)} - frozen == set(sub_model.tensors):
            context.built[key] = (method, module, dict(constants(module)))
        return module
    _, module, first = context.built[key]
    load_into(module, sub_model.tensors)
    for name, value in first.items():  # a forward pass may have changed them
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = value.clone()
    module.zero_grad()
    return module


def frozen_tensors(module: nn.Module) -> set[str]:
    """The names of the tensors that do not change while a network with a frozen base is trained."""
    fixed = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return fixed | set(norm_tensors(module))


def constants(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Copies of the buffers that the state does not include, by name."""
    for prefix, child in module.named_modules():
        for name in sorted(child._non_persistent_buffers_set):
            buffer = child._buffers.get(name)
            if buffer is not None and not buffer.is_meta:
                yield f"{prefix}.{name}" if prefix else name, buffer.clone()


def load_into(module: nn.Module, tensors: Tensors) -> None:
    """Copy `tensors` into the module's tensors of the same names."""
    if tensors:
        with torch.no_grad():
            for name, tensor in named_tensors(module):
                if name in tensors:
                    tensor.copy_(tensors[name])
