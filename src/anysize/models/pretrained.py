"""A narrowed network of transformers as one that its own configuration describes, so that `from_pretrained` opens it.

Narrowing cuts tensors; the configuration still states the sizes of the full network. Here each size in it is tried: an
attribute that, once doubled, changes the shape of tensors that were cut must shrink as they did. What a configuration
sets besides shapes moves into the weights: attention divides by the root of the size of a head, which a narrowed
network does by the full size; and rotary positions have frequencies that depend on it. The result is compared with
the narrowed network before anybody gets it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anysize.errors import ModelError
from anysize.inputs import Input, Inputs
from anysize.models.keyed import is_pretrained_model, keyed

_HEADS = re.compile(r"heads?$")
_HEAD_SIZES = re.compile(r"(head_dim|head_size|^d_kv)$")
_QUERIES = ("q_norm", "query", "q_proj", "q_lin", "q")
"""Names of the layer that makes queries; a norm of the queries comes after it and undoes its scale."""

_NOISE = 0.3
_TOLERANCE = 1e-4

Shapes = dict[str, tuple[int, ...]]


def refitted(network: nn.Module, inputs: Input) -> nn.Module:
    """The same network of transformers with a configuration that states its own sizes; any other network as it is.

    Args:
        network: narrowed, or not.
        inputs: a batch on which both must agree.

    Raises:
        ModelError: no configuration of its kind describes it.
    """
    if not is_pretrained_model(network):
        return network
    model: Any = network
    wanted = _shapes(model)
    why = "its layers are others"
    for config in _configs(model, wanted):
        bare = _built(model, config)
        if _shapes(bare) != wanted:
            why = _difference(_shapes(bare), wanted)
            continue
        # Small weights would hide a wrong number of heads.
        loud = _louder(model)
        difference = distance(loud, _filled(loud, bare), inputs)
        if difference <= _TOLERANCE:
            found: nn.Module = _filled(model, bare).eval()
            return found
        why = f"its outputs would differ by {difference:.2g}"
    raise ModelError(
        f"no {type(model.config).__name__} describes this {type(model).__name__}, so transformers could not open it: "
        f"{why}. Its weights can be written as .safetensors"
    )


def _configs(model: Any, wanted: Shapes) -> Iterator[Any]:
    """Configurations that may describe the network: as it is; shrunk within every head; shrunk by whole heads."""
    yield copy.deepcopy(model.config)
    ratios = _ratios(model, wanted)
    for held in (_HEADS, _HEAD_SIZES):
        config = copy.deepcopy(model.config)
        for key, ratio in ratios.items():
            value = ratio * getattr(config, key)
            if not held.search(key) and value == int(value):
                setattr(config, key, int(value))
        if held is _HEAD_SIZES:
            _fewer_heads(config, ratios)
        yield config


def _fewer_heads(config: Any, ratios: Mapping[str, float]) -> None:
    """Shrink the numbers of heads on which no shape depends as the width does."""
    cuts = [ratio for ratio in ratios.values() if ratio < 1]
    common = max(set(cuts), key=cuts.count, default=1.0)
    for key, value in _sizes(config):
        if _HEADS.search(key) and key not in ratios and value * common == int(value * common):
            setattr(config, key, int(value * common))


def _ratios(model: Any, wanted: Shapes) -> dict[str, float]:
    """For each size in the configuration that tensors follow, how much smaller they are than it says."""
    full = _shapes(_built(model, model.config))
    found = {}
    for key, value in _sizes(model.config):
        config = copy.deepcopy(model.config)
        try:
            setattr(config, key, 2 * value)
            larger = _shapes(_built(model, config))
        except Exception:  # a configuration may refuse a size in any way
            continue
        if larger.keys() != full.keys() or full.keys() != wanted.keys():
            continue
        moved = [(name, axis) for name in full for axis, size in enumerate(full[name]) if larger[name][axis] != size]
        cuts = [wanted[name][axis] / full[name][axis] for name, axis in moved]
        if cuts:
            found[key] = max(set(cuts), key=cuts.count)
    return found


def _sizes(config: Any) -> list[tuple[str, int]]:
    """The whole numbers of a configuration that may be sizes."""
    return [
        (key, value)
        for key, value in config.to_dict().items()
        if type(value) is int and value > 1 and not key.endswith("_id") and hasattr(config, key)
    ]


def _built(model: Any, config: Any) -> Any:
    """A network of that configuration without weights."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(config))


def _shapes(model: Any) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _difference(found: Shapes, wanted: Shapes) -> str:
    names = sorted(found.keys() ^ wanted.keys())
    if names:
        return f"{names[0]} is only in one of them"
    name = next(name for name in found if found[name] != wanted[name])
    return f"{name} has shape {wanted[name]}, and would need {found[name]}"


def _filled(model: Any, bare: Any) -> Any:
    """The network of a fitting configuration with the narrowed network's weights."""
    config = bare.config
    frequencies = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for buffer in list(frequencies.values())[:1]:
        _turn(config, buffer)
    with torch.random.fork_rng(devices=[]):
        made = type(model)(config)
    made.load_state_dict(model.state_dict())
    for path, part in made.named_modules():
        ours, theirs = (getattr(one, "scaling", None) for one in (model.get_submodule(path), part))
        if isinstance(ours, float) and isinstance(theirs, float) and ours != theirs:
            _scale_queries(part, ours / theirs)
    if getattr(config, "scale_decoder_outputs", False):  # as T5 does, by the root of its width
        with torch.no_grad():
            made.decoder.final_layer_norm.weight.mul_((made.model_dim / model.model_dim) ** 0.5)
    return made


def _louder(model: nn.Module) -> nn.Module:
    """The network with large random numbers added to its weights, always the same."""
    random = torch.Generator().manual_seed(0)
    made = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=_NOISE)
    return made


def _turn(config: Any, frequencies: Tensor) -> None:
    """Set the base of rotary positions so that a smaller head has the first of the full one's frequencies."""
    rotary = getattr(config, "rope_parameters", None)
    if not isinstance(rotary, dict) or "rope_theta" not in rotary or len(frequencies) < 2:
        return
    # Frequency i is theta ** (-i / count), and the first of them are kept.
    config.rope_parameters = {**rotary, "rope_theta": float(frequencies[1].double() ** -len(frequencies))}


def _scale_queries(attention: nn.Module, factor: float) -> None:
    """Multiply the queries of an attention, in place."""
    name = next((name for name in _QUERIES if name in attention._modules), None)
    layer: Any = attention._modules.get(name or "c_attn")
    if layer is None:
        return  # the comparison of outputs will tell
    with torch.no_grad():
        for tensor in (tensor for tensor in (layer.weight, getattr(layer, "bias", None)) if tensor is not None):
            queries = tensor if name is not None else tensor[..., : tensor.shape[-1] // 3]
            queries.mul_(factor)


def distance(model: nn.Module, made: nn.Module, inputs: Input) -> float:
    """The largest difference between the outputs of two networks, in units of the largest output if that is above 1."""
    names = inputs.keys() if isinstance(inputs, Inputs) else None
    with torch.no_grad():
        ours, theirs = (keyed(one.eval(), names)(inputs) for one in (model, made))
    return float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1))
