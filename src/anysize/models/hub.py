"""Networks of other packages by name: "hf:..." (transformers), "timm:..." and "torchvision:...".

What follows "hf:" is a folder that `save_pretrained` wrote, a configuration (a folder without weights, or its .json
file), a type of network such as "bert", whose configuration the options give, or a name on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anysize.config.packages import load
from anysize.errors import AnysizeError, DataError, ModelError, first_of, reason, unknown
from anysize.models.keyed import is_pretrained_model
from anysize.tasks import TASKS, CausalLM, MaskedLM, NextToken, Seq2SeqLM, Task, TokenClassification

_HEADS: tuple[tuple[type[Task], tuple[str, ...]], ...] = (
    (TokenClassification, ("AutoModelForTokenClassification",)),
    (MaskedLM, ("AutoModelForMaskedLM",)),
    (CausalLM, ("AutoModelForCausalLM",)),
    (Seq2SeqLM, ("AutoModelForSeq2SeqLM",)),
    (NextToken, ("AutoModelForCausalLM",)),
    (
        Task,
        ("AutoModelForSequenceClassification", "AutoModelForImageClassification", "AutoModelForAudioClassification"),
    ),
)
"""The classes of transformers that have the head for a task; the first row that fits counts."""

_WITH_HEADS = ("token-classification", "masked-lm", "causal-lm", "seq2seq-lm", "classification")
"""The tasks that a head of transformers may be for."""


def function(name: str) -> Callable[..., nn.Module] | None:
    """The function that builds the network of that name; None if the name is not one of another package."""
    package, _, source = name.partition(":")
    return partial(_MAKERS[package], source) if package in _MAKERS and source else None


def hf(
    source: str,
    input_shape: Sequence[int],
    classes: int,
    task: Task,
    folder: Path | None = None,
    bare: bool = False,
    **options: Any,
) -> nn.Module:
    """A network of transformers with the head that the task needs.

    Args:
        source: a folder, a .json file, a type of network, or a name on the hub.
        input_shape: of one sample.
        classes: how many classes there are.
        task: what is learned; it says which head.
        folder: where a relative path begins.
        bare: whether only the structure matters, so that learned weights need not be read.
        options: of the configuration, such as hidden_size.
    """
    config = hf_config(source, task, folder, options, classes)
    fitted = {"image_size": input_shape[-1], "num_channels": input_shape[0]} if len(input_shape) == 3 else {}
    for key, value in fitted.items():
        if key not in options and hasattr(config, key) and is_type(source, folder):
            setattr(config, key, value)
    head = _head(source, config, task)
    place = _folder(source, folder)
    if bare or _is_blank(source, folder):
        with _explained(source, "transformers refuses this configuration"):
            network: nn.Module = head.from_config(config, dtype=torch.float32)
        return network
    what = _NOWHERE if place is None else f"the network in {place} cannot be loaded"
    with _explained(source, what), _quiet():
        network, loaded = head.from_pretrained(
            place or source,
            config=config,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # a head for another number of classes begins anew
            output_loading_info=True,
        )
    _refuse_other_weights(source, network, loaded)
    return network


def _refuse_other_weights(source: str, network: Any, loaded: Mapping[str, Any]) -> None:
    """Raise an error if the weights that were read are of another network, apart from its head."""
    labels = network.config.num_labels
    others = [
        f"{name} has shape {tuple(stored)}, the configuration asks for {tuple(asked)}"
        for name, stored, asked in sorted(loaded["mismatched_keys"])
        if (asked[0], *stored[1:]) != (labels, *asked[1:])
    ]
    if others:
        raise ModelError(f"model 'hf:{source}': its weights do not fit its configuration: {first_of(others)}")
    names, missing = network.state_dict().keys(), loaded["missing_keys"]
    if 2 * len(missing) > len(names):
        raise ModelError(
            f"model 'hf:{source}': its weights are those of another network: {len(missing)} of {len(names)} tensors "
            f"are missing, such as {min(missing)}"
        )


def hf_config(
    source: str, task: Task, folder: Path | None, options: Mapping[str, Any], classes: int | None = None
) -> Any:
    """The configuration of a network of transformers, with the options in it."""
    library = load("transformers", f"model 'hf:{source}'")
    place = _folder(source, folder)
    if place is None and source in library.CONFIG_MAPPING:
        config = library.AutoConfig.for_model(source)
    else:
        with _explained(source, _NOWHERE if place is None else f"{place} holds no configuration of transformers"):
            config = library.AutoConfig.from_pretrained(place or source)
    strange = [key for key in options if not hasattr(config, key) and not key.endswith("_token_id")]
    if strange:
        known = sorted(key for key in config.to_dict() if not key.startswith("_"))
        raise ModelError("; ".join(unknown(f"option of model 'hf:{source}'", key, known) for key in strange))
    chosen = dict(options)
    if classes is not None and "num_labels" not in options and _counts_labels(task):
        chosen["num_labels"] = classes
    if place is None and source in library.CONFIG_MAPPING:
        with _explained(source, "transformers refuses these model.options"):
            return library.AutoConfig.for_model(source, **chosen)
    with _explained(source, "transformers refuses these model.options"):
        for key, value in chosen.items():
            setattr(config, key, value)
    return config


def timm(source: str, input_shape: Sequence[int], classes: int, **options: Any) -> nn.Module:
    """A network of timm.

    Args:
        source: its name there.
        input_shape: (C, H, W).
        classes: how many logits it returns.
        options: of timm.create_model.
    """
    library = load("timm", f"model 'timm:{source}'")
    if source.split(".")[0] not in library.list_models():
        raise ModelError(unknown("model of timm", source, library.list_models()))
    network: nn.Module = library.create_model(source, **{"num_classes": classes, "in_chans": input_shape[0]} | options)
    return network


def torchvision(source: str, input_shape: Sequence[int], classes: int, **options: Any) -> nn.Module:
    """A network of torchvision.

    Args:
        source: its name there.
        input_shape: (3, H, W).
        classes: how many logits it returns.
        options: of torchvision.models.get_model.
    """
    library = load("torchvision", f"model 'torchvision:{source}'").models
    if source not in library.list_models():
        raise ModelError(unknown("model of torchvision", source, library.list_models()))
    if input_shape[0] != 3:
        raise ModelError(f"model 'torchvision:{source}' takes images of 3 channels; the data has {input_shape[0]}")
    network: nn.Module = library.get_model(source, **{"weights": None, "num_classes": classes} | options)
    return network


_MAKERS: dict[str, Callable[..., nn.Module]] = {"hf": hf, "timm": timm, "torchvision": torchvision}


def learned(name: str, options: Mapping[str, Any], folder: Path | None) -> bool:
    """Whether the network of that name comes with weights that were learned."""
    package, _, source = name.partition(":")
    if package == "hf":
        return not _is_blank(source, folder)
    return package in _MAKERS and bool(options.get("pretrained") or options.get("weights"))


def logits(name: str, options: Mapping[str, Any], task: Task, folder: Path | None = None) -> int | None:
    """How many classes or tokens the network of that name has logits for; None if as many as the data has classes."""
    package, _, source = name.partition(":")
    if package != "hf":
        return None
    if _counts_labels(task):
        return options.get("num_labels")
    return int(hf_config(source, task, folder, options).get_text_config().vocab_size)


def check_head(network: nn.Module, task: Task, names: Sequence[str]) -> None:
    """Refuse a network of transformers whose head is known to be that of another task, or whose decoder gets nothing.

    Args:
        network: any module.
        task: what is learned.
        names: of the inputs.

    Raises:
        ModelError: it says which task the head is for, or what the data lacks.
    """
    if not is_pretrained_model(network) or type(task) not in TASKS.values():
        return
    kind = type(network).__name__
    fits = _has_head(network, _head_names(task))
    others = [] if fits else [name for name in _WITH_HEADS if _has_head(network, _head_names(TASKS[name]()))]
    if others:
        asked = next(name for name, known in TASKS.items() if known is type(task))
        listed = " or ".join(f'"{name}"' for name in others)
        raise ModelError(
            f'task: "{asked}", but {kind} has the head for {listed}; give task={listed}, or a network of '
            f"{' or '.join(_head_names(task))}"
        )
    if type(task) is Seq2SeqLM and "decoder_input_ids" not in names:
        raise ModelError(
            f"{kind} needs decoder_input_ids, which the data lacks; the collator makes them if it has the network: "
            "DataCollatorForSeq2Seq(tokenizer, model=network)"
        )


def check_targets(network: nn.Module | None, name: str, task: Task, shape: tuple[int, ...]) -> None:
    """Refuse targets of a shape that the task of a network of transformers cannot have.

    Args:
        network: a live one; None if the name says which.
        name: of the network.
        task: what is learned.
        shape: of one sample's target.
    """
    if not (name.startswith("hf:") if network is None else is_pretrained_model(network)):
        return
    per_token = isinstance(task, Seq2SeqLM)  # and the tasks that are kinds of it
    if (not per_token and type(task) is not TASKS["classification"]) or len(shape) == int(per_token):
        return
    asked = next((name for name, known in TASKS.items() if known is type(task)), type(task).__name__)
    if per_token:
        collators, targets = _COLLATORS.get(asked, ("one that makes labels", "text"))
        raise DataError(
            f'task: "{asked}" needs a target for every token, the data has one per sample; in Python take a collator '
            f'such as {collators}, in a file data.options.target = "{targets}"'
        )
    raise DataError(
        f'task: "classification" needs one class per sample, the data has targets of shape {shape}; in Python take a '
        "collator that leaves labels as they are, such as DataCollatorWithPadding, in a file data.options.target = "
        '"class"; or name another task'
    )


_COLLATORS = {
    "token-classification": ("DataCollatorForTokenClassification", "tags"),
    "masked-lm": ("DataCollatorForLanguageModeling", "masked"),
    "causal-lm": ("DataCollatorForLanguageModeling(mlm=False)", "tokens"),
    "seq2seq-lm": ("DataCollatorForSeq2Seq", "text"),
}
"""For each task the collator of transformers that makes its targets, and what a file calls these."""


def is_type(source: str, folder: Path | None) -> bool:
    """Whether a name is a type of network in transformers, such as "bert", and no folder of the same name exists."""
    return _folder(source, folder) is None and source in load("transformers", f"model 'hf:{source}'").CONFIG_MAPPING


def _counts_labels(task: Task) -> bool:
    """Whether a head counts classes rather than tokens."""
    return not isinstance(task, NextToken) or isinstance(task, TokenClassification)


def _head_names(task: Task) -> tuple[str, ...]:
    """The classes of transformers whose networks have the head for a task."""
    return next(names for kind, names in _HEADS if isinstance(task, kind))


def _has_head(network: Any, names: Sequence[str]) -> bool:
    """Whether one of these classes would build a network of this one's class from its configuration."""
    library = load("transformers", "the model")
    built = (getattr(library, name)._model_mapping.get(type(network.config), None) for name in names)
    return any(isinstance(network, kind) for kind in built if kind is not None)


def _is_blank(source: str, folder: Path | None) -> bool:
    """Whether a name gives a configuration alone: a type of network, a .json file, or a folder without weights."""
    place = _folder(source, folder)
    if place is None:
        return is_type(source, folder)
    return place.is_file() or not [*place.glob("*.safetensors"), *place.glob("pytorch_model*.bin")]


def _folder(source: str, folder: Path | None) -> Path | None:
    """The folder or .json file of that name, seen from the experiment file or from here; None if there is none."""
    places = [(folder or Path()) / source, Path(source)]
    is_file = source.endswith(".json")
    return next((place for place in places if (place if is_file else place / "config.json").is_file()), None)


def _head(source: str, config: Any, task: Task) -> Any:
    """The class of transformers that builds the network of a configuration with the head for a task."""
    library = load("transformers", f"model 'hf:{source}'")
    names = _head_names(task)
    heads = [getattr(library, name) for name in names]
    fitting = [head for head in heads if type(config) in head._model_mapping]
    if not fitting:
        wanted = " or ".join(names)
        raise ModelError(f"model 'hf:{source}': {type(config).__name__} has no {wanted}, which this task needs")
    return fitting[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing progress bars and tables of what it loads."""
    logging = load("transformers", "the model").utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


_NOWHERE = (
    "there is no such folder with a config.json here, no such type of network in transformers, and the hub did not "
    "give it"
)


@contextmanager
def _explained(source: str, what: str) -> Iterator[None]:
    """Turn what transformers raises, of whatever type, into one line that begins with what is wrong."""
    try:
        yield
    except AnysizeError:
        raise
    except Exception as error:
        raise ModelError(f"model 'hf:{source}': {what} ({reason(error)})") from None
