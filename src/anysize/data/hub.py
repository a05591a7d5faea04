"""Data sets of the package `datasets`: "hf:..." names a file, a folder, or a set on the Hugging Face hub.

Files are .json, .jsonl, .csv, .parquet or .arrow. A folder holds such files, one for each split ("train.csv",
"test.csv"), or is one that `save_to_disk` wrote. Options name the columns.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from anysize.config.packages import load
from anysize.data import files
from anysize.data.parts import Array, CollatedPart, Data, Part, TensorPart
from anysize.errors import DataError, reason, unknown
from anysize.tasks import IGNORED

Target = Literal["class", "tags", "text", "tokens", "masked"]
_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def hf(
    source: str,
    folder: Path | None = None,
    *,
    text: str | Sequence[str] | None = None,
    image: str | None = None,
    columns: Sequence[str] = (),
    label: str | None = None,
    target: str = "class",
    tokenizer: str | None = None,
    length: int = 128,
    mask: float = 0.15,
    decoder_start: int | None = None,
    group: str | None = None,
    train: str = "train",
    test: str = "test",
    held_out: float = 0.0,
) -> Data:
    """A data set of the package `datasets`.

    Texts are tokenized and filled up to the longest of their split. They stay in memory as tensors; only masked words
    are drawn anew for every batch.

    Args:
        source: a file or folder, seen from the experiment file, from here or from $ANYSIZE_DATA; or a name on the hub.
        folder: that of the experiment file.
        text: the column of texts, or two columns whose texts form a pair.
        image: the column of images, all of one size.
        columns: columns of numbers that the network takes under their own names, instead of a text or an image.
        label: the column of targets; for texts that are their own target, none.
        target: what is learned: a "class" for each sample, "tags" (a class for each word, where the text is a list of
            words), a "text", the "tokens" of the text itself, or those that are "masked".
        tokenizer: a folder or a name on the hub.
        length: the most tokens of a text; longer ones are cut.
        mask: the fraction of tokens that are masked.
        decoder_start: the token with which a target text begins; by default the network's, if the tokenizer's folder
            has its configuration.
        group: the column of data groups, for split = "natural".
        train: the split to train on.
        test: the split to test on, if there is one.
        held_out: the fraction of the training split that becomes the test part, if there is no test split.
    """
    problems = _problems(source, text, image, columns, label, target, tokenizer)
    problems += _number_problems(length, mask, held_out)
    if problems:
        raise DataError(f"data set 'hf:{source}': {'; '.join(problems)}")
    splits = _splits(source, folder)
    if train not in splits:
        raise DataError(f"data set 'hf:{source}': {unknown('split', train, splits)}")
    parts = {"train": splits[train], "test": splits.get(test)}
    if held_out and parts["test"] is None:
        parts = dict(parts["train"].train_test_split(test_size=held_out, seed=0))
    wanted = [*([text] if isinstance(text, str) else text or ()), *columns, *(c for c in (image, label, group) if c)]
    missing = [name for name in wanted if name not in parts["train"].column_names]
    if missing:
        known = parts["train"].column_names
        raise DataError(f"data set 'hf:{source}': " + "; ".join(unknown("column", name, known) for name in missing))
    tokens = None if tokenizer is None else _Tokens(tokenizer, folder, length, decoder_start)
    names = _class_names(parts["train"], label) if label is not None and target in ("class", "tags") else None
    made: dict[str, Any] = {
        which: _part(rows, text, image, columns, label, target, tokens, mask, group, names)
        for which, rows in parts.items()
        if rows is not None
    }
    classes = None if names is None else len(names)
    return Data(**made, classes=classes, class_names=names, source=f"hf:{source}")


def _problems(
    source: str,
    text: str | Sequence[str] | None,
    image: str | None,
    columns: Sequence[str],
    label: str | None,
    target: str,
    tokenizer: str | None,
) -> list[str]:
    """What is wrong with the options."""
    problems = []
    if sum(map(bool, (text, image, columns))) != 1:
        problems.append("give one of data.options.text, image and columns: the columns that the network takes")
    if target not in get_args(Target):
        problems.append(unknown("target", target, get_args(Target)))
    if text and tokenizer is None:
        problems.append("data.options.tokenizer is missing: a folder or a name on the hub")
    if target not in ("tokens", "masked") and label is None:
        problems.append("data.options.label is missing: the column of targets")
    if target != "class" and not text:
        problems.append(f'target = "{target}" is for texts; give data.options.text')
    return problems


def _number_problems(length: int, mask: float, held_out: float) -> list[str]:
    """What is wrong with the options that are numbers."""
    problems = []
    if not isinstance(length, int) or length < 1:
        problems.append(f"data.options.length = {length!r}; allowed: an integer, 1 or more")
    if not isinstance(mask, float) or not 0 < mask < 1:
        problems.append(f"data.options.mask = {mask!r}; allowed: above 0 and below 1")
    if not isinstance(held_out, int | float) or not 0 <= held_out < 1:
        problems.append(f"data.options.held_out = {held_out!r}; allowed: 0, or above 0 and below 1")
    return problems


def _located(source: str, folder: Path | None) -> Path | None:
    """The file or folder of that name; None if there is none."""
    places = [(folder or Path()) / source, Path(source), *(Path(place) / source for place in files.search_folders())]
    return next((place for place in places if place.exists()), None)


def _splits(source: str, folder: Path | None) -> dict[str, Any]:
    """The splits of a data set by name."""
    library = load("datasets", f"data set 'hf:{source}'")
    place = _located(source, folder)
    library.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    try:
        if place is None:
            found = library.load_dataset(source)
        elif place.is_dir() and any((place / name).is_file() for name in ("dataset_dict.json", "state.json")):
            found = library.load_from_disk(str(place))
        else:
            found = _read(library, source, place)
    except DataError:
        raise
    except Exception as error:  # the package raises many types
        where = "there is no such file or folder here, and the hub did not give it" if place is None else f"{place}"
        raise DataError(f"data set 'hf:{source}': {where} ({reason(error)})") from None
    return dict(found) if hasattr(found, "keys") else {"train": found}


def _read(library: Any, source: str, place: Path) -> Any:
    """The splits in files: each file of a folder is one, a single file is all there is to train on."""
    paths = sorted(place.iterdir()) if place.is_dir() else [place]
    fitting = [path for path in paths if path.suffix in _FORMATS]
    forms = {_FORMATS[path.suffix] for path in fitting}
    if len(forms) != 1:
        known = ", ".join(_FORMATS)
        raise DataError(f"data set 'hf:{source}': {place} holds files of {len(forms)} known formats; one of {known}")
    by_split = {path.stem: str(path) for path in fitting} if place.is_dir() else {"train": str(place)}
    return library.load_dataset(forms.pop(), data_files=by_split)


class _Tokens:
    """A tokenizer, and how long a text may be."""

    def __init__(self, name: str, folder: Path | None, length: int, start: int | None) -> None:
        self._library = load("transformers", f"tokenizer '{name}'")
        place = _located(name, folder)
        try:
            self.tokenizer = self._library.AutoTokenizer.from_pretrained(str(place or name))
        except Exception as error:  # the package raises many types
            where = "is no folder here, nor on the hub" if place is None else "is here, but holds no tokenizer"
            raise DataError(f"data.options.tokenizer: '{name}' {where} ({reason(error)})") from None
        if self.tokenizer.pad_token is None:
            if self.tokenizer.eos_token is None:
                raise DataError(f"data.options.tokenizer: '{name}' has no token that fills texts up (pad_token)")
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self._length = length
        self._start = start
        self._config = place if place is not None and (place / "config.json").is_file() else None

    def encoded(self, texts: Sequence[Any], pairs: Sequence[Any] | None = None, words: bool = False) -> Any:
        """Texts as tokens, filled up to the longest."""
        return self.tokenizer(
            list(texts),
            None if pairs is None else list(pairs),
            truncation=True,
            max_length=self._length,
            padding=True,
            is_split_into_words=words,
        )

    def inputs(self, encoded: Any) -> dict[str, Array]:
        """What the network takes of tokenized texts."""
        return {name: np.asarray(encoded[name], np.int32) for name in encoded if name in self._names}

    @property
    def _names(self) -> set[str]:
        return {*self.tokenizer.model_input_names, "attention_mask"}

    def targets(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Target texts as tokens, and the same shifted by one position, as a decoder reads them."""
        made = self.tokenizer(text_target=list(texts), truncation=True, max_length=self._length, padding=True)
        tokens, present = np.asarray(made["input_ids"], np.int32), np.asarray(made["attention_mask"], bool)
        shifted = np.concatenate([np.full_like(tokens[:, :1], self._begin()), tokens[:, :-1]], axis=1)
        return np.where(present, tokens, IGNORED), shifted

    def _begin(self) -> int:
        """The token with which a decoder begins."""
        if self._start is not None:
            return self._start
        config = None if self._config is None else self._library.AutoConfig.from_pretrained(self._config)
        found = getattr(config, "decoder_start_token_id", None)
        if found is None:
            raise DataError(
                "data.options.decoder_start is missing: the token with which a target text begins, the network's "
                "config.decoder_start_token_id"
            )
        return int(found)

    def masked(self, encoded: Any, mask: float) -> CollatedPart:
        """A part whose tokens are masked anew for every batch."""
        if self.tokenizer.mask_token is None:
            raise DataError('target = "masked": the tokenizer has no mask_token')
        collate = self._library.DataCollatorForLanguageModeling(self.tokenizer, mlm=True, mlm_probability=mask)
        inputs = self.inputs(encoded)
        rows = [dict(zip(inputs, row)) for row in zip(*inputs.values())]
        return CollatedPart(rows, collate)


def _part(
    rows: Any,
    text: str | Sequence[str] | None,
    image: str | None,
    columns: Sequence[str],
    label: str | None,
    target: str,
    tokens: _Tokens | None,
    mask: float,
    group: str | None,
    names: Sequence[str] | None,
) -> Part:
    """The samples of one split."""
    groups = None if group is None else np.asarray(list(rows[group]))
    if text is None or tokens is None:
        x: Any = {name: np.asarray(list(rows[name])) for name in columns}
        if image is not None:
            x = np.stack([np.asarray(picture) for picture in rows[image]])
        return TensorPart(x, _labels(list(rows[label or ""]), names), groups)
    first, *second = [text] if isinstance(text, str) else text
    pairs = rows[second[0]] if second else None
    encoded = tokens.encoded(rows[first], pairs, words=target == "tags")
    if target == "masked":
        part = tokens.masked(encoded, mask)
        part.group = groups
        return part
    inputs = tokens.inputs(encoded)
    if target == "tokens":
        y = np.where(inputs["attention_mask"] > 0, inputs["input_ids"], IGNORED)
    elif target == "text":
        y, inputs["decoder_input_ids"] = tokens.targets(list(rows[label or ""]))
    elif target == "tags":
        y = _tags(encoded, [_labels(tags, names) for tags in rows[label or ""]])
    else:
        y = _labels(list(rows[label or ""]), names)
    return TensorPart(inputs, y, groups)


def _class_names(rows: Any, label: str) -> list[str] | None:
    """The names of the classes in a column; None if it holds numbers without names."""
    feature = rows.features[label]
    feature = getattr(feature, "feature", feature)  # of a list: what it holds
    if hasattr(feature, "names"):
        return [str(name) for name in feature.names]
    values = list(rows[label])
    flat = [tag for tags in values for tag in tags] if isinstance(values[0], list) else values
    return sorted(set(flat)) if isinstance(flat[0], str) else None


def _labels(values: Sequence[Any], names: Sequence[str] | None) -> Array:
    """Targets as numbers; those that are words by their place among the names."""
    if not values or not isinstance(values[0], str):
        return np.asarray(values)
    assert names is not None
    places = {name: place for place, name in enumerate(names)}
    strange = sorted({value for value in values if value not in places})
    if strange:
        raise DataError(f"the training split has no class {', '.join(strange)}, which another split has")
    return np.asarray([places[value] for value in values])


def _tags(encoded: Any, tags: Sequence[Array]) -> Array:
    """One class for each token: that of its word for the first token of a word, -100 for all others."""
    made = np.full(torch.tensor(encoded["input_ids"]).shape, IGNORED)
    for row, own in enumerate(tags):
        words = encoded.word_ids(row)
        for place, word in enumerate(words):
            if word is not None and (place == 0 or words[place - 1] != word):
                made[row, place] = own[word]
    return made
