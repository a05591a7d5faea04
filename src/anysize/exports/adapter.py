"""A finished adapter as a folder that peft opens, read back and compared before it is kept."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anysize.elastic.adapters import ADAPTER, Adapter, load_peft, lora_config, quiet
from anysize.elastic.skeleton import copied
from anysize.errors import ModelError
from anysize.experiment.signature import Signature
from anysize.exports.formats import TOLERANCE, Exported, check_path, sample_inputs
from anysize.models import Keyed, vocabulary

_NORMALISED = "network."  # before the names of a network that follows a normalisation; see `models.normalize`
_KEYED = "network."  # before those of a network that is called by keyword; see `models.keyed`


def write_adapter(adapter: Adapter, folder: Path, signature: Signature) -> Exported:
    """Write an adapter as peft's own folder: adapter_config.json and adapter_model.safetensors.

    Where the network normalises its inputs first, the adapter is one of the network behind that layer.

    Args:
        adapter: the adapter, with its networks.
        folder: must not exist yet, or be empty.
        signature: shapes and types of the network's inputs.
    """
    check_path(folder)
    prefix, names = _within(adapter.base, signature)
    base, merged = (net.get_submodule(prefix.rstrip(".")) for net in (adapter.base, adapter.merged))
    whole = sorted({name.removeprefix(prefix).rpartition(".")[0] for name in adapter.head})
    _check_names(base, whole)
    layers = [site.name.removeprefix(prefix) for site in adapter.sites]
    config = lora_config(layers, adapter.rank, adapter.scaling, modules_to_save=whole or None)
    peft, inputs = load_peft(), sample_inputs(signature, 2, vocabulary(base))
    expected = _outputs(merged, names, inputs)
    try:
        with quiet(), tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}") as room:
            made = peft.get_peft_model(copied(base), config)
            _fill(made.base_model.model, prefix, adapter)
            made.save_pretrained(room)
            opened = _outputs(peft.PeftModel.from_pretrained(base, room), names, inputs)
            difference = float((opened - expected).abs().max())
            if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
                raise ModelError(f"{folder}: the written adapter's outputs differ from the network's by {difference:g}")
            folder.mkdir(exist_ok=True)
            for file in sorted(Path(room).iterdir()):
                shutil.move(file, folder / file.name)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror or error}") from None
    return Exported(folder, sum(file.stat().st_size for file in folder.iterdir()), difference)


def _within(network: nn.Module, signature: Signature) -> tuple[str, tuple[str, ...] | None]:
    """What stands before the names of the network that a user knows, and the names of its inputs if it has such."""
    prefix = _NORMALISED if signature.mean is not None else ""
    inner = network.get_submodule(_NORMALISED.rstrip(".")) if prefix else network
    return (f"{prefix}{_KEYED}", inner.names) if isinstance(inner, Keyed) else (prefix, None)


def _check_names(network: nn.Module, whole: list[str]) -> None:
    """Refuse a head that peft would take for others, since it compares the ends of names."""
    for name in whole:
        others = [other for other, _ in network.named_modules() if other.endswith(name) and other != name]
        if others:
            raise ModelError(f"peft cannot tell the head, {name}, from {others[0]} by its name; write merged weights")


def _fill(network: nn.Module, prefix: str, adapter: Adapter) -> None:
    """Copy what was learned into peft's modules."""
    with torch.no_grad():
        for site in adapter.sites:
            layer = network.get_submodule(site.name.removeprefix(prefix))
            layer.get_parameter(f"lora_B.{ADAPTER}.weight").copy_(adapter.left[site.name])
            layer.get_parameter(f"lora_A.{ADAPTER}.weight").copy_(adapter.right[site.name])
        for name, tensor in adapter.head.items():
            module, _, leaf = name.removeprefix(prefix).rpartition(".")
            network.get_parameter(f"{module}.modules_to_save.{ADAPTER}.{leaf}").copy_(tensor)


def _outputs(network: nn.Module, names: tuple[str, ...] | None, inputs: Any) -> Tensor:
    called = network if names is None else Keyed(network, names)
    with torch.no_grad():
        outputs: Tensor = called.eval()(inputs)
    return outputs
