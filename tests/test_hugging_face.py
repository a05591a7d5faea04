"""Networks of transformers and data of `datasets` as they come; no test needs a network connection."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from inspect import isfunction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anysize as az
from anysize.client.objectives import make_objective
from anysize.config import packages
from anysize.data import CollatedPart, largest_token, load
from anysize.elastic.axes import trace
from anysize.elastic.slicing import narrow
from anysize.errors import AnysizeError, ConfigError, DataError, ModelError
from anysize.experiment.inspect import inspect
from anysize.experiment.signature import Signature
from anysize.exports.bundle import write_bundle
from anysize.exports.formats import export
from anysize.exports.onnx_bundle import write_onnx_bundle
from anysize.exports.packing import Entry
from anysize.inputs import Inputs
from anysize.methods.training import Batch, Tricks
from anysize.models import build, check_head, keyed, learned, plain
from anysize.models.pretrained import refitted
from anysize.tasks import task as named_task
from small import fast_if

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")
pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
packages.load_torchvision()

import transformers  # noqa: E402 - after the operators that it asks of torchvision

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "very", "a", "not", "plot", "we", "saw"]
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 24,
}
GPT: dict[str, Any] = {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
T5: dict[str, Any] = {"vocab_size": 24, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}


def tokenizer() -> Any:
    """A tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, mask_token="[MASK]", **special)


def texts(count: int) -> list[dict[str, Any]]:
    """Reviews of a few words, good or bad."""
    rng = np.random.default_rng(0)
    rows = []
    for place in range(count):
        middle = [WORDS[word] for word in rng.integers(7, len(WORDS), rng.integers(1, 7))]
        rows.append({"text": " ".join([WORDS[5 + place % 2], *middle]), "label": place % 2, "writer": f"w{place % 4}"})
    return rows


def write_reviews(home: Path) -> None:
    """Write a tokenizer and reviews into a folder."""
    tokenizer().save_pretrained(home / "words")
    (home / "reviews").mkdir()
    for split, count in (("train", 48), ("test", 16)):
        lines = "\n".join(json.dumps(row) for row in texts(count))
        (home / "reviews" / f"{split}.jsonl").write_text(lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and reviews."""
    home = tmp_path_factory.mktemp("hf")
    write_reviews(home)
    return home


def bert(head: str = "SequenceClassification", **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, f"Bert{'For' + head}")(transformers.BertConfig(**SMALL | options))


def encoded(count: int = 64) -> list[dict[str, Any]]:
    """Tokenized reviews of different lengths, as dicts."""
    tokens = tokenizer()
    return [{**tokens(row["text"]), "label": row["label"]} for row in texts(count)]


def live(**options: Any) -> dict[str, Any]:
    """An experiment on live objects: a classifier of reviews."""
    rows = encoded()
    data = az.Data(rows[:48], rows[48:], collate=transformers.DataCollatorWithPadding(tokenizer()))
    small: dict[str, Any] = {"clients": 4, "method": "heterofl", "rounds": 1, "engine": "inprocess"}
    small |= {"training": {"batch_size": 8}, "devices": {"capacities": [0.5, 1.0]}}
    return {"data": data, "model": bert(), **small, **options}


def experiment_file(folder: Path, **tables: Any) -> dict[str, Any]:
    """The same experiment with names alone."""
    options = {"text": "text", "label": "label", "tokenizer": str(folder / "words"), "length": 16}
    made = {
        "rounds": 1,
        "data": {"name": f"hf:{folder / 'reviews'}", "clients": 4, "options": options},
        "model": {"name": "hf:bert", "options": SMALL},
        "method": {"name": "heterofl"},
        "devices": {"capacities": [0.5, 1.0]},
        "training": {"batch_size": 8},
    }
    return {**made, **tables}


# Our step is transformers' own


def batches() -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    """A network and a batch with labels for each task."""
    torch.manual_seed(0)
    ids = torch.randint(5, 20, (3, 9))
    mask = (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()
    padded = torch.where(mask > 0, ids, -100)
    some = torch.where(torch.rand(3, 9) < 0.4, ids, -100)
    decoder = torch.cat([torch.zeros(3, 1, dtype=torch.long), ids[:, :-1]], 1)
    text = {"input_ids": ids, "attention_mask": mask}
    config = transformers.T5Config(**T5, dropout_rate=0.0)
    return {
        "classification": (bert(num_labels=3), {**text, "labels": torch.tensor([0, 2, 1])}),
        "token-classification": (bert("TokenClassification", num_labels=24), {**text, "labels": some}),
        "masked-lm": (bert("MaskedLM"), {**text, "labels": some}),
        "causal-lm": (transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT)), {**text, "labels": padded}),
        "seq2seq-lm": (
            transformers.T5ForConditionalGeneration(config),
            {**text, "decoder_input_ids": decoder, "labels": padded},
        ),
    }


@pytest.mark.parametrize("name", ["classification", "token-classification", "masked-lm", "causal-lm", "seq2seq-lm"])
def test_the_loss_and_gradients_of_a_step_are_those_of_transformers_itself(name: str) -> None:
    network, batch = batches()[name]
    network.eval()
    theirs = network(**batch).loss
    wanted = torch.autograd.grad(theirs, list(network.parameters()), allow_unused=True)
    x = Inputs({key: value for key, value in batch.items() if key != "labels"})
    objective = make_objective(named_task(name), Tricks(), None)
    ours = objective(keyed(network, x.keys()), Batch(x, batch["labels"]))
    found = torch.autograd.grad(ours, list(network.parameters()), allow_unused=True)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or torch.allclose(mine, other, atol=1e-7)


@pytest.mark.parametrize("name", ["token-classification", "masked-lm", "causal-lm", "seq2seq-lm"])
def test_a_batch_without_a_single_target_gives_no_loss_and_no_gradient(name: str) -> None:
    output = torch.randn(2, 5, 7, requires_grad=True)
    loss = named_task(name).loss(output, torch.full((2, 5), -100))
    loss.backward()
    assert loss.item() == 0
    assert not output.grad.any()


def test_metrics_per_token_leave_out_what_does_not_count() -> None:
    output = nn.functional.one_hot(torch.tensor([[1, 2, 0, 0]]), 4).float() * 9
    target = torch.tensor([[1, 3, -100, -100]])
    sums = named_task("token-classification").sums(output, target)
    assert sums["count"] == 2
    assert named_task("token-classification").metrics(sums)["accuracy"] == 0.5
    assert named_task("causal-lm").sums(output, target)["count"] == 1, "the first token has no predecessor"


# Live objects


def test_a_live_network_trains_on_texts_of_different_lengths(tmp_path: Path) -> None:
    experiment = az.Experiment(**live(rounds=1))
    run = experiment.run(out=tmp_path / "run")
    assert set(run.evaluate()) == {"0.5", "1.0"}
    small = run.customize(size=0.5)
    assert isinstance(small, transformers.BertForSequenceClassification), "the user's own network, only smaller"
    assert small.classifier.weight.shape == (2, 16)
    answer = small(**tokenizer()(["good film", "bad"], padding=True, return_tensors="pt"))
    assert answer.logits.shape == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fjord", "splitmix", "flanc", "prism", "ladder", "elf"])
def test_every_method_trains_a_live_network(method: str, tmp_path: Path) -> None:
    run = az.Experiment(**live(method=method)).run(out=tmp_path / "run")
    assert all(np.isfinite(metrics["loss"]) for metrics in run.evaluate().values())


def test_padding_does_not_change_what_a_network_answers() -> None:
    rows = encoded()
    part = CollatedPart(rows, transformers.DataCollatorWithPadding(tokenizer()))
    network = keyed(bert().eval(), list(part.batch(torch.tensor([0]))[0]))
    together, _ = part.batch(torch.arange(8))
    alone = [network(part.batch(torch.tensor([place]))[0]) for place in range(8)]
    assert len({len(row["input_ids"]) for row in rows[:8]}) > 1
    assert torch.allclose(network(together), torch.cat(alone), atol=1e-6)


def test_masks_are_drawn_from_the_samples_of_a_batch_alone() -> None:
    collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.5)
    rows = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in encoded()]
    part = CollatedPart(rows, collate)
    torch.manual_seed(1)
    first, again = part.batch(torch.arange(8)), part.batch(torch.arange(8))
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == after, "the global generator is left as it was"
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[0]["input_ids"], again[0]["input_ids"])
    assert (first[1] != -100).any()
    assert not torch.equal(first[1][:4], part.batch(torch.arange(4))[1][:, : first[1].shape[1]])


# By name


@pytest.mark.slow
def test_a_file_names_network_and_data_and_both_engines_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    runs = []
    for engine in ({"name": "inprocess"}, {"name": "processes", "workers": 2}):
        experiment = az.Experiment(**experiment_file(folder, engine=engine))
        runs.append(experiment.run(out=tmp_path / engine["name"]))
    first, second = (run.customize(size=1.0).state_dict() for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert runs[0].evaluate() == runs[1].evaluate()


TASKS = {
    "token-classification": ("bert", SMALL, {"target": "tags", "text": "words", "label": "tags"}),
    "masked-lm": ("bert", SMALL, {"target": "masked", "text": "text"}),
    "causal-lm": ("gpt2", GPT, {"target": "tokens", "text": "text"}),
    "seq2seq-lm": ("t5", T5, {"target": "text", "text": "text", "label": "answer", "decoder_start": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_by_name(name: str, folder: Path, tmp_path: Path) -> None:
    kind, config, options = TASKS[name]
    rows = [
        {"text": row["text"], "words": (words := row["text"].split()), "answer": words[0]}
        | {"tags": ["feeling" if word in ("good", "bad") else "other" for word in words]}
        for row in texts(48)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = {"name": f"hf:{tmp_path / 'rows.jsonl'}", "clients": 4}
    data["options"] = {"tokenizer": str(folder / "words"), "held_out": 0.25, **options}
    tables = experiment_file(folder, data=data, model={"name": f"hf:{kind}", "options": config}, task=name)
    run = az.Experiment(**tables, engine="inprocess").run(out=tmp_path / "run")
    assert all(np.isfinite(metrics["loss"]) for metrics in run.evaluate().values())


def test_a_folder_starts_training_from_its_weights(folder: Path, tmp_path: Path) -> None:
    network = bert(num_labels=2)
    network.save_pretrained(tmp_path / "start")
    options = experiment_file(folder, model={"name": f"hf:{tmp_path / 'start'}"})
    experiment = az.Experiment(**options)
    assert experiment._starts_learned
    found = dict(experiment.model.named_parameters())
    assert all(torch.equal(found[f"network.{name}"], value) for name, value in network.named_parameters())


def test_a_configuration_alone_gives_random_weights_of_the_seed(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    bert().config.save_pretrained(tmp_path / "bare")
    weights = []
    for name in ("bare", "bare/config.json"):
        network = build(f"hf:{tmp_path / name}", (8,), 2, seed=3)
        weights.append(network.classifier.weight)
        assert not learned(f"hf:{tmp_path / name}", {}, None)
    assert torch.equal(*weights)
    assert learned(f"hf:{saved(tmp_path / 'whole')}", {}, None)


def saved(folder: Path) -> Path:
    bert().save_pretrained(folder)
    return folder


def test_texts_become_padded_tokens_with_their_class_and_group(folder: Path) -> None:
    options = {"text": "text", "label": "label", "group": "writer", "tokenizer": "words", "length": 6}
    data = load("hf:reviews", options, folder)
    x, y = data.train.batch(torch.arange(4))
    wanted = tokenizer()([row["text"] for row in texts(4)], truncation=True, max_length=6, padding="max_length")
    assert x["input_ids"].tolist() == wanted["input_ids"]
    assert x["attention_mask"].tolist() == wanted["attention_mask"]
    assert y.tolist() == [0, 1, 0, 1]
    assert data.train.group.tolist()[:5] == ["w0", "w1", "w2", "w3", "w0"]
    assert len(data.test) == 16


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow", "disk"])
def test_every_format_holds_the_same_samples(form: str, folder: Path, tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(texts(12))
    if form == "disk":
        datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "rows")
    else:
        (tmp_path / "rows").mkdir()
        path = tmp_path / "rows" / f"train.{form}"
        if form == "arrow":
            rows.save_to_disk(tmp_path / "saved")
            (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(path)
        else:
            getattr(rows, f"to_{form}")(str(path))
    options = {"text": "text", "label": "label", "tokenizer": str(folder / "words")}
    found = load(f"hf:{tmp_path / 'rows'}", options)
    whole = load("hf:reviews", options | {"tokenizer": "words"}, folder)
    x, y = found.train.batch(torch.arange(12))
    other, classes = whole.train.batch(torch.arange(12))
    width = x["input_ids"].shape[1]
    assert torch.equal(x["input_ids"], other["input_ids"][:, :width])
    assert torch.equal(y, classes)


def test_words_get_the_tag_of_their_first_token_and_others_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"words": ["good", "film", "we"], "tags": ["x", "y", "x"]}))
    options = {"text": "words", "label": "tags", "target": "tags", "tokenizer": "words"}
    data = load(f"hf:{tmp_path / 'a.jsonl'}", options, folder)
    assert data.train.labels().tolist() == [[-100, 0, 1, 0, -100]]
    assert data.class_names == ("x", "y")


@pytest.mark.parametrize("package,name", [("timm", "timm:resnet10t"), ("torchvision", "torchvision:resnet18")])
def test_other_packages_give_networks_by_name(package: str, name: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    network = build(name, (3, 32, 32), 7)
    assert network.eval()(torch.rand(2, 3, 32, 32)).shape == (2, 7)
    again = build(name, (3, 32, 32), 7)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), again.parameters()))


# A customised network is one of transformers


OPEN = """
import sys, torch
from anysize.config.packages import load_torchvision
load_torchvision()  # only mends torchvision, where its wheel is for other devices
import transformers
batch = torch.load(sys.argv[2])
network = getattr(transformers, sys.argv[3]).from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save({"logits": network(**batch).logits, "width": network.config.hidden_size}, sys.argv[4])
assert not any(name.startswith("anysize.models") for name in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["within", "whole"])
def test_a_folder_from_the_command_line_opens_elsewhere_with_transformers(
    heads: str, folder: Path, tmp_path: Path
) -> None:
    model = {"name": "hf:bert", "options": SMALL, "heads": heads}
    experiment = az.Experiment(**experiment_file(folder, model=model, engine="inprocess"))
    run = experiment.run(out=tmp_path / "run")
    command = ["customize", str(tmp_path / "run"), "--size", "0.5", "--to", f"{tmp_path / 'small'}/"]
    done = subprocess.run([sys.executable, "-m", "anysize", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    batch = dict(tokenizer()(["good film", "we saw a bad plot"], padding=True, return_tensors="pt"))
    torch.save(batch, tmp_path / "batch.pt")
    arguments = [tmp_path / "small", tmp_path / "batch.pt", "AutoModelForSequenceClassification", tmp_path / "out.pt"]
    subprocess.run([sys.executable, "-c", OPEN, *map(str, arguments)], check=True)
    theirs = torch.load(tmp_path / "out.pt")
    assert theirs["width"] == 16
    with torch.no_grad():
        cut = run._cut(run.size(0.5))  # as it was trained and measured
        assert torch.allclose(theirs["logits"], cut(Inputs(batch)), atol=1e-5)


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("MaskedLM", "hidden_size", SMALL),
    "gpt2": ("CausalLM", "n_embd", GPT),
    "llama": ("CausalLM", "hidden_size", {**SMALL, "num_key_value_heads": 2}),
    "qwen3": ("CausalLM", "head_dim", {**SMALL, "num_key_value_heads": 2, "head_dim": 8}),
    "distilbert": ("TokenClassification", "dim", {"vocab_size": 24, "dim": 32, "n_layers": 2, "n_heads": 4}),
    "t5": ("Seq2SeqLM", "d_model", T5),
    "bart": (
        "Seq2SeqLM",
        "d_model",
        {"vocab_size": 24, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
        | {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("heads", ["within", "whole"])
@pytest.mark.parametrize("kind", fast_if("gpt2".__eq__, FAMILIES))
def test_the_configuration_of_a_narrowed_network_shrinks_with_it(kind: str, heads: Any, tmp_path: Path) -> None:
    head, key, options = FAMILIES[kind]
    torch.manual_seed(0)
    full = getattr(transformers, f"AutoModelFor{head}").from_config(transformers.AutoConfig.for_model(kind, **options))
    batch = {"input_ids": torch.randint(3, 24, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    batch["attention_mask"][1, -3:] = 0
    batch |= {"decoder_input_ids": torch.randint(3, 24, (2, 9))} if head == "Seq2SeqLM" else {}
    network = keyed(full.eval(), list(batch))
    small = narrow(network, trace(network, tuple(batch.values()), heads=heads), 0.5)
    made = refitted(plain(small), Inputs(batch))
    if key != "head_dim" or heads == "within":
        assert getattr(made.config, key) == getattr(full.config, key) // 2
    made.save_pretrained(tmp_path / "small")
    again = type(full).from_pretrained(tmp_path / "small").eval()
    with torch.no_grad():
        assert torch.allclose(again(**batch).logits, small(Inputs(batch)), atol=1e-5)
    if head == "CausalLM":
        assert again.generate(batch["input_ids"], max_new_tokens=2, min_new_tokens=2).shape == (2, 11)


def test_a_network_that_no_configuration_describes_is_refused_in_one_line() -> None:
    network = bert().eval()
    network.bert.encoder.layer[0].intermediate.dense = nn.Linear(32, 20)
    network.bert.encoder.layer[0].output.dense = nn.Linear(20, 32)
    with pytest.raises(ModelError, match="no BertConfig describes this BertForSequenceClassification") as raised:
        refitted(network, Inputs({"input_ids": torch.ones(2, 5, dtype=torch.long)}))
    assert "\n" not in str(raised.value)


def test_only_networks_of_transformers_are_written_as_folders(tmp_path: Path) -> None:
    about = Signature((4,), False, (), True, 2, 2, None, None, None)
    with pytest.raises(ModelError, match="only a network of transformers is written as a folder"):
        export(nn.Linear(4, 2), tmp_path / "net", about)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["onnx", "pt2", "safetensors"])
def test_a_network_of_several_inputs_is_written_in_every_format(ending: str, tmp_path: Path) -> None:
    inputs = (("input_ids", (7,), True), ("attention_mask", (7,), True))
    about = Signature((7,), True, (), True, 2, 2, None, None, None, inputs)
    done = export(bert().eval(), tmp_path / f"net.{ending}", about)
    assert done.difference < 1e-4
    if ending == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(done.path))
        assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask"]


VISION = pytest.mark.skipif(find_spec("timm") is None, reason="the extra `vision` is not installed")


# What cannot work says why in one line


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.layer(left + right)


def test_a_network_of_the_users_own_takes_several_inputs_by_name() -> None:
    left, right = torch.rand(40, 4), torch.rand(40, 4)
    data = az.Data(train=({"left": left, "right": right}, (left[:, 0] > right[:, 0]).long()))
    experiment = az.Experiment(data=data, clients=4, model=Two(), method="fedavg", rounds=1, engine="inprocess")
    assert experiment.context.axes.classifier == "network.layer"


def of_two(tmp_path: Path) -> Any:
    """A finished run of a network of two inputs, one of them of integers."""
    torch.manual_seed(0)
    left, right = torch.rand(40, 4), torch.randint(0, 3, (40, 4))
    data = az.Data(
        train=({"left": left, "right": right}, (left[:, 0] > 0.5).long()),
        test=({"left": left, "right": right}, (left[:, 0] > 0.5).long()),
    )
    made = az.Experiment(
        data=data,
        clients=4,
        model=Mixed(),
        method="heterofl",
        rounds=1,
        engine="inprocess",
        devices={"capacities": [0.5, 1.0]},
    )
    return made.run(tmp_path / "run")


class Mixed(nn.Module):
    """A network of numbers and symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.symbols, self.head = nn.Linear(4, 8), nn.Embedding(3, 8), nn.Linear(8, 2)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.numbers(left) + self.symbols(right).sum(1)))


@pytest.mark.parametrize("runtime", ["torch", "onnx"])
def test_a_bundle_holds_networks_of_several_inputs(runtime: str, tmp_path: Path) -> None:
    run = of_two(tmp_path)
    path = run.bundle(tmp_path / "net.anysize", runtime=runtime).path
    loader = importlib.import_module(f"anysize.{'onnx_runtime' if runtime == 'onnx' else 'runtime'}")
    network = loader.load(path)
    assert network.inputs == {"left": (4,), "right": (4,)}
    left, right = torch.rand(3, 4), torch.randint(0, 3, (3, 4))
    given = {"right": right, "left": left}
    asked = {name: x.numpy() for name, x in given.items()} if runtime == "onnx" else given
    for size in (0.5, 1.0):
        expected = run.customize(size)(left, right).detach()
        torch.testing.assert_close(torch.as_tensor(network.switch(str(size))(asked)), expected, atol=1e-5, rtol=1e-5)
    assert network.choices[0].metrics["accuracy"] == pytest.approx(run.evaluate(0.5)["0.5"]["accuracy"])
    assert set(network.measure(repeats=1)) == {"0.5", "1.0"}
    for wrong, words in (
        (asked["left"], "the network takes a mapping of left, right; given one"),
        ({"left": asked["left"]}, "the network takes a mapping of left, right; given left"),
        ({**asked, "left": asked["left"].sum()}, r"input left has shape \(\); expected \(N, 4\)"),
        ({**asked, "right": asked["right"][:2]}, r"input right has shape \(2, 4\); expected \(3, 4\)"),
        ({**asked, "right": asked["left"]}, "input right is .*float32; expected tokens as int64"),
    ):
        with pytest.raises(loader.BundleError, match=words):
            network(wrong)


@pytest.mark.parametrize("kind,runtime", fast_if(lambda *case: case == ("gpt2", "torch"), FAMILIES, ("torch", "onnx")))
def test_a_bundle_holds_networks_of_transformers(kind: str, runtime: str, tmp_path: Path) -> None:
    head, _, options = FAMILIES[kind]
    torch.manual_seed(0)
    full = getattr(transformers, f"AutoModelFor{head}").from_config(transformers.AutoConfig.for_model(kind, **options))
    batch = {"input_ids": torch.randint(3, 24, (4, 9)), "attention_mask": torch.ones(4, 9, dtype=torch.long)}
    batch["attention_mask"][1, -3:] = 0
    batch |= {"decoder_input_ids": torch.randint(3, 24, (4, 5))} if head == "Seq2SeqLM" else {}
    network = keyed(full.eval(), list(batch))
    axes = trace(network, tuple(batch.values()))
    networks = {label: narrow(network, axes, float(label)).eval() for label in ("0.5", "1.0")}
    inputs = tuple((name, tuple(tensor.shape[1:]), True) for name, tensor in batch.items())
    about = Signature((9,), True, (9,), True, 24, 24, None, None, None, inputs)
    entries = [Entry(label, float(label), {None: one}) for label, one in networks.items()]
    write = write_onnx_bundle if runtime == "onnx" else write_bundle
    path = write(entries, tmp_path / "net.anysize", about, axes).path
    loader = importlib.import_module(f"anysize.{'onnx_runtime' if runtime == 'onnx' else 'runtime'}")
    bundle = loader.load(path)
    given = {name: tensor.numpy() for name, tensor in batch.items()} if runtime == "onnx" else batch
    for label, one in networks.items():
        with torch.no_grad():
            expected = plain(one)(**batch).logits
        torch.testing.assert_close(torch.as_tensor(bundle.switch(label)(given)), expected, atol=1e-4, rtol=1e-4)


BUNDLED = ("classification", "causal-lm", "seq2seq-lm")


@pytest.mark.parametrize(
    "task,runtime", fast_if(lambda *case: case == ("causal-lm", "torch"), BUNDLED, ("torch", "onnx"))
)
def test_a_bundle_states_the_metrics_of_test_texts_shorter_than_those_for_training(
    task: str, runtime: str, tmp_path: Path
) -> None:
    rows = encoded(40)
    rows.sort(key=lambda row: -len(row["input_ids"]))
    assert len(rows[-8]["input_ids"]) < len(rows[0]["input_ids"])
    collate: Any = transformers.DataCollatorWithPadding(tokenizer())
    network: Any = bert()
    if task == "causal-lm":
        network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))
        collate = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows]
    if task == "seq2seq-lm":
        network = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
        collate = transformers.DataCollatorForSeq2Seq(tokenizer(), model=network)
        rows = [
            {"input_ids": r["input_ids"], "attention_mask": r["attention_mask"], "labels": r["input_ids"]} for r in rows
        ]
    data = az.Data(rows[:-8], rows[-8:], collate=collate)
    run = az.Experiment(**live(data=data, model=network, task=task)).run(tmp_path / "run", progress=False)
    path = run.bundle(tmp_path / "net.anysize", runtime=runtime).path
    stated = importlib.import_module(f"anysize.{'onnx_runtime' if runtime == 'onnx' else 'runtime'}").load(path).choices
    for choice in stated:
        assert choice.metrics == pytest.approx(run.evaluate(choice.size)[choice.size], rel=1e-4)
    assert len(stated) == 2


@pytest.mark.parametrize("kind", fast_if("bert".__eq__, ["bert", "gpt2", "llama", "t5"]))
def test_inspect_says_which_methods_train_a_network_of_transformers(kind: str) -> None:
    head, _, options = FAMILIES[kind]
    network = getattr(transformers, f"AutoModelFor{head}").from_config(
        transformers.AutoConfig.for_model(kind, **options)
    )
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in encoded(16)]
    collate: Any = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=head == "MaskedLM")
    if head == "Seq2SeqLM":
        rows = [{**row, "labels": row["input_ids"]} for row in rows]
        collate = transformers.DataCollatorForSeq2Seq(tokenizer(), model=network)
    task = {"MaskedLM": "masked-lm", "CausalLM": "causal-lm", "Seq2SeqLM": "seq2seq-lm"}[head]
    found = inspect(az.Experiment(**live(data=az.Data(rows, collate=collate), model=network, task=task)))
    refused = {row["name"]: row["why"] for row in found["methods"] if not row["can"]}
    assert "oat" in refused
    assert {"fedavg", "heterofl", "fjord", "splitmix", "ladder", "lora"}.isdisjoint(refused), refused
    assert not any("Error" in why for why in refused.values()), refused


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2", "distilbert"])
def test_texts_of_a_file_in_onnx_may_have_any_length(kind: str, tmp_path: Path) -> None:
    import onnxruntime

    torch.manual_seed(0)
    makes = {
        "bert": bert,
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT)),
        "distilbert": lambda: transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(vocab_size=24, dim=32, hidden_dim=48, n_layers=2, n_heads=4)
        ),
    }
    network = makes[kind]().eval()
    inputs = (("input_ids", (8,), True), ("attention_mask", (8,), True))
    several = kind == "gpt2"
    about = Signature((8,), True, (8,) * several, True, 24 if several else 2, 2, None, None, None, inputs)
    done = export(network, tmp_path / "net.onnx", about)
    assert done.length is None
    session = onnxruntime.InferenceSession(str(done.path))
    for count, length in ((1, 3), (3, 13)):
        ids, mask = torch.randint(0, 24, (count, length)), torch.ones(count, length, dtype=torch.int64)
        mask[0, -1] = 0
        found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        with torch.no_grad():
            expected = network(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=1e-4)


class Placed(nn.Module):
    """A network of texts with a fixed number of places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(9, 4), nn.Parameter(torch.rand(6, 4)), nn.Linear(4, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x) + self.places)


def test_a_file_says_how_many_tokens_a_text_must_have_if_the_network_fixes_that(tmp_path: Path) -> None:
    about = Signature((6,), True, (6,), True, 9, 9, None, None, None)
    assert export(Placed().eval(), tmp_path / "net.onnx", about).length == 6
    assert export(Placed().eval(), tmp_path / "net.pt2", about).length == 6
    assert export(Placed().eval(), tmp_path / "net.safetensors", about).length is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "inputs without names": (
        {"data": az.Data(train=(torch.rand(8, 4), [0, 1] * 4)), "model": Two()},
        "Two.forward needs left, right, but the data has one input without a name; name them",
    ),
    "an input too many": (
        {"data": az.Data(train=({"input_ids": [[1, 2]] * 4, "idx": [[1]] * 4}, [0, 1] * 2))},
        "BertForSequenceClassification.forward has no input idx; leave it out of the data",
    ),
    "an input too few": (
        {"data": az.Data(train=({"left": torch.rand(8, 4)}, [0, 1] * 4)), "model": Two()},
        "Two.forward needs right; the data has left",
    ),
    "classes with a point": (
        {"data": az.Data(train=(torch.rand(8, 4), [0.5] * 8)), "model": nn.Linear(4, 2)},
        'the labels are numbers with a point; encode them, or name the task "regression"',
    ),
    "labels below 0": (
        {"data": lambda: az.Data(train=({"input_ids": [[1, 9]] * 4}, [-1] * 4))},
        "labels begin at -1; classes count from 0",
    ),
    "two arrays without names": (
        {"data": lambda: az.Data(train=((torch.rand(8, 4), torch.rand(8, 4)), [0, 1] * 4)), "model": Two()},
        "x is a tuple of 2 arrays; several inputs need the names that the network's forward gives them",
    ),
    "pictures for a network that reads": (
        {"data": az.Data(train=(torch.rand(8, 3, 8, 8), [0, 1] * 4))},
        "BertForSequenceClassification reads tokens, the data has numbers of shape (3, 8, 8); give texts",
    ),
    "targets per token": (
        {"data": az.Data(train=({"input_ids": [[1, 9]] * 4}, [[0, 1]] * 4))},
        "needs one class per sample, the data has targets of shape (2,); in Python take a collator that leaves labels",
    ),
    "a target per text": (
        {
            "data": az.Data(train=({"input_ids": [[1, 9]] * 4}, [0, 1] * 2)),
            "model": lambda: bert("MaskedLM"),
            "task": "masked-lm",
        },
        "needs a target for every token, the data has one per sample; in Python take a collator such as",
    ),
    "a frozen network": (
        {"model": lambda: bert().requires_grad_(False)},
        "no parameter of the network is trained: all have requires_grad = False",
    ),
    "a network without weights": (
        {"model": lambda: bert().to("meta")},
        "its parameters are on the meta device; load or make them first",
    ),
    "a compiled network": (
        {"model": lambda: torch.compile(bert())},
        "the model was compiled; give the network itself",
    ),
    "a class for a network": (
        {"model": lambda: transformers.BertForSequenceClassification},
        "the model is the class BertForSequenceClassification; give a network",
    ),
    "a configuration for a network": (
        {"model": lambda: transformers.BertConfig(**SMALL)},
        "the model is a BertConfig; give a name, or a network: any nn.Module, such as AutoModelForSequenceClass",
    ),
    "a foreign tokenizer": (
        {"data": az.Data(train=({"input_ids": [[1, 99]] * 4}, [0, 1] * 2))},
        "the data has the token 99, the network embeddings for 0 to 23; use the tokenizer",
    ),
    "a network without a head": (
        {"model": lambda: transformers.BertModel(bert().config)},
        "BertModel returns no logits; use a network with a head",
    ),
    "a head for another task": (
        {"task": "causal-lm"},
        'task: "causal-lm", but BertForSequenceClassification has the head for "classification"; give task="classif',
    ),
    "a text too long": (
        {"data": az.Data(train=({"input_ids": [[1] * 65] * 4}, [0, 1] * 2))},
        "the longest text has 65 tokens, the network positions for 64; cut texts, in Python with tokenizer(text, trunc",
    ),
    "too few labels": (
        {"data": az.Data(train=({"input_ids": [[1, 9]] * 4}, [0, 1, 2, 3]))},
        "model: it has logits for 2, but the data has 4 classes",
    ),
}


@pytest.mark.parametrize(
    "head,task",
    [("MaskedLM", "masked-lm"), ("TokenClassification", "token-classification"), ("LMHeadModel", "causal-lm")],
)
def test_a_live_network_of_another_task_names_the_task_to_give(head: str, task: str) -> None:
    network = (
        bert(head).eval() if head != "LMHeadModel" else transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))
    )
    check_head(network, named_task(task), ())
    with pytest.raises(ModelError, match=f'give task="{task}"'):
        check_head(network, named_task("classification"), ())


def made(changed: dict[str, Any]) -> dict[str, Any]:
    """The objects of an experiment, those that functions make for one test alone among them."""
    return {name: value() if isfunction(value) else value for name, value in changed.items()}


@pytest.mark.parametrize("what", BAD)
def test_bad_objects_are_refused_in_one_line(what: str) -> None:
    changed, words = BAD[what]
    with pytest.raises(AnysizeError) as raised:
        _ = az.Experiment(**live(**made(changed))).context
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_decoder_without_inputs_is_refused_and_the_collator_named() -> None:
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in encoded(16)]
    network = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    for model, words in ((None, "needs decoder_input_ids, which the data lacks"), (network, None)):
        data = az.Data(rows, collate=transformers.DataCollatorForSeq2Seq(tokenizer(), model=model))
        experiment = az.Experiment(**live(data=data, model=network, task="seq2seq-lm"))
        if words is None:
            assert experiment.context.axes.groups
            continue
        with pytest.raises(ModelError, match=words) as raised:
            _ = experiment.context
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("what", ["no padding", "a text in a column"])
def test_a_collator_that_fails_is_named_in_one_line(what: str) -> None:
    tokens, rows = tokenizer(), encoded(8)
    if what == "no padding":
        tokens.pad_token = None
    else:
        rows = [{**row, "text": "good film"} for row in rows]
    part = CollatedPart(rows, transformers.DataCollatorWithPadding(tokens))
    with pytest.raises(DataError, match=r"collate cannot batch samples with input_ids.*: ValueError") as raised:
        part.batch(torch.tensor([0, 1]))
    assert "\n" not in str(raised.value)


def test_a_collator_that_returns_no_mapping_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match="collate returned a NoneType; it must return tensors by name"):
        CollatedPart(encoded(4), lambda rows: None).batch(torch.tensor([0]))  # type: ignore[arg-type, return-value]


def test_a_sample_without_a_name_that_others_have_is_named() -> None:
    with pytest.raises(DataError, match="sample 4 has no input_ids, which sample 0 has"):
        CollatedPart([*encoded(4), {"label": 1}]).column("input_ids")


@pytest.mark.parametrize("masks, largest", [(False, 40), (True, 46)])
def test_tokens_that_a_collator_puts_into_texts_are_counted(masks: bool, largest: int) -> None:
    tokens = tokenizer()
    tokens.add_tokens([f"w{place}" for place in range(33)])
    tokens.pad_token = "w26"
    kinds = {True: transformers.DataCollatorForLanguageModeling, False: transformers.DataCollatorWithPadding}
    assert (tokens.pad_token_id, len(tokens)) == (40, 47)
    assert largest_token(CollatedPart(encoded(4), kinds[masks](tokens))) == largest


def test_rows_of_datasets_may_be_tensors() -> None:
    from datasets import Dataset

    rows, collate = encoded(16), transformers.DataCollatorWithPadding(tokenizer())
    made = [Dataset.from_list(rows), Dataset.from_list(rows).with_format("torch")]
    lists, tensors = (CollatedPart(one, collate) for one in made)
    assert (tensors.longest, largest_token(tensors)) == (lists.longest, largest_token(lists))
    assert torch.equal(tensors.labels(), lists.labels())
    index = torch.tensor([3, 0])
    assert torch.equal(tensors.batch(index)[0]["input_ids"], lists.batch(index)[0]["input_ids"])


@pytest.mark.parametrize(
    "options,words",
    [
        ({"label": "lable"}, "unknown column 'lable'; did you mean 'label'?"),
        ({"tokenizer": None}, "data.options.tokenizer is missing"),
        ({"tokenizer": "nobody/unknown"}, "'nobody/unknown' is no folder here, nor on the hub"),
        ({"text": None}, "give one of data.options.text, image and columns"),
        ({"target": "clas"}, "unknown target 'clas'; did you mean 'class'?"),
        ({"train": "trian"}, "unknown split 'trian'; did you mean 'train'?"),
        ({"lenght": 3}, "unknown option of data set 'hf:reviews' 'lenght'; did you mean 'length'?"),
        ({"target": "text"}, "data.options.decoder_start is missing"),
        ({"length": 0}, "data.options.length = 0; allowed: an integer, 1 or more"),
        ({"length": "long"}, "data.options.length = 'long'; allowed: an integer, 1 or more"),
        ({"mask": 15}, "data.options.mask = 15; allowed: above 0 and below 1"),
        ({"held_out": 20}, "data.options.held_out = 20; allowed: 0, or above 0 and below 1"),
        ({"tokenizer": "reviews"}, "'reviews' is here, but holds no tokenizer ("),
    ],
)
def test_bad_options_of_data_are_refused_in_one_line(options: dict[str, Any], words: str, folder: Path) -> None:
    good = {"text": "text", "label": "text" if "target" in options else "label", "tokenizer": "words"}
    with pytest.raises(DataError) as raised:
        load("hf:reviews", {key: value for key, value in (good | options).items() if value is not None}, folder)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name,options,words",
    [
        ("hf:nobody/unknown", {}, "there is no such folder with a config.json here, no such type of network"),
        ("hf:bert", {"hiden_size": 3}, "unknown option of model 'hf:bert' 'hiden_size'; did you mean 'hidden_size'?"),
        pytest.param("timm:resnet10x", {}, "unknown model of timm 'resnet10x'; did you mean", marks=VISION),
        pytest.param("torchvision:resnet17", {}, "unknown model of torchvision 'resnet17'; did you", marks=VISION),
    ],
)
def test_unknown_networks_are_refused_in_one_line(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as raised:
        build(name, (3, 32, 32), 2, options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def broken(what: str, folder: Path) -> None:
    """Write a network's folder in which something is wrong."""
    bert().save_pretrained(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    told = json.loads(config.read_text())
    if what == "cut weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "another network's weights":
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT)).save_pretrained(folder / "other")
        weights.write_bytes((folder / "other" / "model.safetensors").read_bytes())
    elif what == "no json":
        config.write_text("{")
    else:
        changes = {"another size": {"hidden_size": 64}, "no type": {"model_type": None}}
        config.write_text(json.dumps(told | changes.get(what, {"num_attention_heads": 5})))


@pytest.mark.parametrize(
    "what,words",
    [
        ("cut weights", "the network in {} cannot be loaded ("),
        ("another size", "its weights do not fit its configuration: bert.embeddings.LayerNorm.bias has shape (32,)"),
        ("another network's weights", "its weights are those of another network: "),
        ("no json", "{} holds no configuration of transformers ("),
        ("no type", "{} holds no configuration of transformers ("),
        ("heads that do not fit", "the network in {} cannot be loaded (The hidden size (32) is not a multiple"),
    ],
)
def test_a_broken_folder_is_refused_in_one_line(what: str, words: str, tmp_path: Path, capfd: Any) -> None:
    broken(what, tmp_path)
    capfd.readouterr()
    with pytest.raises(ModelError) as raised:
        build(f"hf:{tmp_path}", (7,), 2)
    assert words.format(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    "options,words",
    [
        ({"vocab_size": "many"}, "transformers refuses these model.options (Validation error for field 'vocab_size': "),
        (
            {"hidden_size": 30, "num_attention_heads": 4},
            "transformers refuses this configuration (The hidden size (30)",
        ),
    ],
)
def test_options_that_no_configuration_allows_are_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as raised:
        build("hf:bert", (7,), 2, options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_gets_a_new_head_for_another_number_of_classes(tmp_path: Path) -> None:
    saved = bert(num_labels=7)
    saved.save_pretrained(tmp_path)
    made = build(f"hf:{tmp_path}", (7,), 3)
    assert tuple(made.classifier.weight.shape) == (3, 32)
    assert torch.equal(made.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)


def test_a_data_set_that_is_nowhere_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match="there is no such file or folder here, and the hub did not give it") as raised:
        load("hf:nobody/unknown", {"columns": ["x"], "label": "y"})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("package", ["transformers", "timm"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anysize.config.extras.find_spec", lambda name: None)
    name, extra = {"transformers": ("hf:bert", "hf"), "timm": ("timm:resnet10t", "vision")}[package]
    with pytest.raises(ConfigError, match=rf"needs {package}, not installed: pip install .*\[{extra}\]"):
        build(name, (3, 8, 8), 2)


def test_nothing_of_hugging_face_is_imported_unless_a_name_asks_for_it() -> None:
    code = "import sys, anysize as az; az.Experiment(data='digits', clients=2, model='mlp', method='fedavg').model; "
    code += "print([name for name in ('transformers', 'datasets', 'timm', 'torchvision') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


CLASSIFIERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", SMALL),
    "llama": ("LlamaForSequenceClassification", "LlamaConfig", SMALL | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "qwen3": (
        "Qwen3ForSequenceClassification",
        "Qwen3Config",
        SMALL | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    ),
    "gpt2": ("GPT2ForSequenceClassification", "GPT2Config", GPT),
}


def classifier_of(name: str) -> Any:
    network, config, options = CLASSIFIERS[name]
    torch.manual_seed(0)
    return getattr(transformers, network)(getattr(transformers, config)(**options))


@pytest.mark.parametrize("name", fast_if(lambda name: name == "bert", CLASSIFIERS))
def test_a_live_network_loses_whole_heads_and_keeps_their_width(name: str, tmp_path: Path) -> None:
    run = az.Experiment(**live(model=classifier_of(name), heads="whole")).run(tmp_path / "run", progress=False)
    config = run.customize(size=0.5).config
    assert config.num_attention_heads == 2
    if hasattr(config, "num_key_value_heads"):
        assert config.num_key_value_heads == 1
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert head == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_live_network_trains_at_several_depths(name: str, tmp_path: Path) -> None:
    method = {"name": "elf", "depths": [1, 2], "sparsities": [0.0], "proxy": 0}
    groups = [{"name": "shallow", "depth": 1}, {"name": "deep", "depth": 2}]
    given = live(model=classifier_of(name), method=method, devices={"groups": groups})
    run = az.Experiment(**given).run(tmp_path / "run", progress=False)
    counts = [sum(value.numel() for value in run.customize(size=size.label).parameters()) for size in run.sizes]
    block = next(part for part in classifier_of(name).modules() if isinstance(part, nn.ModuleList))[0]
    assert counts[1] - counts[0] == sum(value.numel() for value in block.parameters())
