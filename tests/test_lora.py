"""Adapters of unequal rank: every merge against numpy, peft's own arithmetic, what travels, what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import anysize as az
from anysize.deploy.affordable import message_cost
from anysize.elastic import adapters
from anysize.elastic.adapters import Adapted, Site, site_of, sites
from anysize.elastic.skeleton import tensors_of
from anysize.errors import AnysizeError, ConfigError, MethodError, ModelError, TrustError
from anysize.experiment.plan import plan
from anysize.methods import FedAvg, LoRA
from anysize.methods.lora import _MERGES, Factors, LoRAState, Merge
from anysize.methods.mean import StreamingMean
from anysize.methods.messages import Client, Ticket
from anysize.methods.size import Size
from anysize.runs.experiment import Experiment
from anysize.testing import check_method

with_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra lora")
MERGES = ("zero-padding", "svd", "stacking", "basis", "sampled")


# --- merges against numpy -----------------------------------------------------------------------------------

LAYER = Site("fc", 5, 4)
CLIENTS = [(1, 3.0), (2, 1.0), (3, 2.0)]
"""Each client's rank and weight."""


def random_factors(rank: int, seed: int, site: Site = LAYER) -> Factors:
    random = torch.Generator().manual_seed(seed)
    shapes = site.left_shape(rank), site.right_shape(rank)
    left, right = (torch.randn(shape, generator=random) for shape in shapes)
    return Factors({site.name: left}, {site.name: right})


def ticket(client: int) -> Ticket:
    return Ticket(client, round=1, seed=0, size="1.0", width=1.0)


def merged(name: str, site: Site = LAYER) -> tuple[Merge, LoRAState, list[tuple[np.ndarray, np.ndarray, float]]]:
    """The merge, the state after one round of three clients, and what they sent."""
    merge = _MERGES[name]([site], [1, 2, 3], 0)
    state = merge.start()
    sent = [random_factors(rank, seed, site) for seed, (rank, _) in enumerate(CLIENTS)]
    merge.begin(state, StreamingMean)
    for number, (factors, (rank, weight)) in enumerate(zip(sent, CLIENTS)):
        merge.add(state, factors, rank, weight, ticket(number))
    arrays = [
        (f.left[site.name].flatten(1).numpy(), f.right[site.name].flatten(1).numpy(), weight)
        for f, (_, weight) in zip(sent, CLIENTS)
    ]
    return merge, merge.merged(state), arrays


def of(factors: Factors) -> tuple[np.ndarray, np.ndarray]:
    return tuple(side["fc"].flatten(1).numpy() for side in (factors.left, factors.right))


def test_zero_padding_is_the_mean_of_padded_factors_and_a_smaller_rank_has_the_first() -> None:
    merge, state, sent = merged("zero-padding")
    left, right, total = np.zeros((5, 3)), np.zeros((3, 4)), sum(weight for *_, weight in sent)
    for b, a, weight in sent:
        left[:, : b.shape[1]] += weight / total * b
        right[: len(a)] += weight / total * a
    for rank in (1, 2, 3):
        found = of(merge.finished(state, rank))
        np.testing.assert_allclose(found[0], left[:, :rank], atol=1e-6)
        np.testing.assert_allclose(found[1], right[:rank], atol=1e-6)


@pytest.mark.parametrize("site", [LAYER, Site("fc", 5, 4, (3, 3))], ids=["linear", "convolution"])
def test_svd_is_the_best_approximation_of_the_mean_product_at_every_rank(site: Site) -> None:
    merge, state, sent = merged("svd", site)
    mean = np.average([b @ a for b, a, _ in sent], axis=0, weights=[weight for *_, weight in sent])
    u, values, v = np.linalg.svd(mean, full_matrices=False)
    for rank in (1, 2, 3):
        left, right = of(merge.finished(state, rank))
        np.testing.assert_allclose(left @ right, (u[:, :rank] * values[:rank]) @ v[:rank], atol=1e-5)
        error = np.linalg.norm(mean - left @ right)
        assert error == pytest.approx(np.sqrt((values[rank:] ** 2).sum()), abs=1e-5)


def test_stacking_is_the_exact_sum_of_products() -> None:
    merge, state, sent = merged("stacking")
    total = sum(weight for *_, weight in sent)
    stacked = np.hstack([b for b, *_ in sent]) @ np.vstack([weight / total * a for _, a, weight in sent])
    np.testing.assert_allclose(state.sums["fc"].numpy(), stacked, atol=1e-6)
    merge.begin(state, StreamingMean)  # a second round adds to the first
    merge.add(state, random_factors(2, 9), 2, 1.0, ticket(0))
    more = of(random_factors(2, 9))
    np.testing.assert_allclose(merge.merged(state).sums["fc"].numpy(), stacked + more[0] @ more[1], atol=1e-5)


def test_stacking_starts_every_clients_adapter_anew() -> None:
    merge, state, _ = merged("stacking")
    one, other = (merge.sent(state, 2, ticket(client)) for client in (0, 1))
    assert not one.left["fc"].any()
    assert not torch.equal(one.right["fc"], other.right["fc"])
    assert torch.equal(one.right["fc"], merge.sent(state, 2, ticket(0)).right["fc"])


def test_a_basis_is_averaged_over_its_holders_and_coefficients_over_their_rank() -> None:
    merge, state, sent = merged("basis")
    for i in range(3):  # row i of the basis: clients of a larger rank hold it
        rows, weights = zip(*((a[i], weight) for _, a, weight in sent if len(a) > i))
        np.testing.assert_allclose(state.right["fc"][i], np.average(rows, axis=0, weights=weights), atol=1e-6)
    for rank, (b, *_) in zip((1, 2, 3), sent):
        np.testing.assert_allclose(of(merge.finished(state, rank))[0], b, atol=1e-6)


def test_sampled_directions_are_averaged_over_the_clients_that_drew_them() -> None:
    merge, before = _MERGES["sampled"]([LAYER], [1, 2, 3], 0), LoRAState("", {"every rank": {}}, {})
    whole = random_factors(3, 7)
    before = replace(before, left={"every rank": whole.left}, right=whole.right)
    merge.begin(before, StreamingMean)
    left, right = (side.copy() for side in of(whole))
    sums: dict[int, list[tuple[np.ndarray, np.ndarray, float]]] = {}
    for client, (rank, weight) in enumerate(CLIENTS):
        own = merge.sent(before, rank, ticket(client))
        at = [next(i for i in range(3) if np.array_equal(left[:, i], column)) for column in of(own)[0].T]
        assert len(set(at)) == rank
        taught = Factors({"fc": own.left["fc"] + 1.0}, {"fc": own.right["fc"] - 2.0 * client})
        merge.add(before, taught, rank, weight, ticket(client))
        for place, i in enumerate(at):
            sums.setdefault(i, []).append((of(taught)[0][:, place], of(taught)[1][place], weight))
    for i, held in sums.items():
        columns, rows, weights = zip(*held)
        left[:, i], right[i] = (np.average(part, axis=0, weights=weights) for part in (columns, rows))
    found = of(merge.finished(merge.merged(before), 3))
    np.testing.assert_allclose(found[0] @ found[1], left @ right, atol=1e-4)
    values = np.linalg.norm(found[0], axis=0) * np.linalg.norm(found[1], axis=1)
    assert (np.diff(values) <= 1e-5).all()  # the most important first


@pytest.mark.parametrize("name", ["svd", "sampled"])
def test_directions_that_nobody_learned_can_still_be_learned(name: str) -> None:
    merge = _MERGES[name]([LAYER], [3], 0)
    state = merge.start()
    merge.begin(state, StreamingMean)
    merge.add(state, state.factors, 3, 1.0, ticket(0))
    after = merge.merged(state)
    assert torch.equal(after.right["fc"], state.right["fc"])
    assert after.right["fc"].any()
    assert not after.left["every rank"]["fc"].any()


# --- which layers -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the head too, a grouped convolution, torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.grouped = nn.Conv1d(8, 8, 3, groups=2)
        self.plain = nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight


def test_all_linear_leaves_out_what_no_adapter_can_change() -> None:
    assert [site.name for site in sites(Tied(), "all-linear", [])] == ["plain"]


def test_targets_are_ends_of_names_or_one_expression_for_whole_names() -> None:
    net = nn.ModuleDict({"a": nn.ModuleDict({"key": nn.Linear(2, 2)}), "b": nn.ModuleDict({"key": nn.Linear(2, 2)})})
    assert [site.name for site in sites(net, ["key"], [])] == ["a.key", "b.key"]
    assert [site.name for site in sites(net, ["a.key"], [])] == ["a.key"]
    assert [site.name for site in sites(net, r"b\..*", [])] == ["b.key"]
    with pytest.raises(ModelError, match="unknown layer 'kex'"):
        sites(net, ["kex"], [])
    with pytest.raises(ModelError, match=r"names a \(ModuleDict\); allowed: linear layers and convolutions"):
        sites(net, ["a"], [])
    with pytest.raises(ModelError, match="no regular expression"):
        sites(net, "(", [])


# --- peft's modules -----------------------------------------------------------------------------------------


def digits(method: Any, model: Any = None, **more: Any) -> Experiment:
    given: dict[str, Any] = {
        "data": "digits",
        "clients": 6,
        "model": model or {"name": "mlp", "options": {"hidden": [24, 16]}},
        "rounds": 2,
        "evaluate_every": 2,
        "devices": {"capacities": [0.25, 1.0]},
        "training": {"local_steps": 2, "batch_size": 8},
    }
    return Experiment(method=method, **(given | more))


def convolved() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1, bias=False),
        nn.Flatten(),
        nn.Linear(192, 10),
    )


@with_peft
def test_the_finished_weights_are_those_that_peft_merges() -> None:
    """Linear layers, convolutions and the transposed layers of transformers, with a scaling that is not one."""
    from transformers.pytorch_utils import Conv1D

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 5, 1), nn.Flatten(2), nn.Linear(16, 7), Conv1D(4, 7)
        )
    before = tensors_of(net)
    found = sites(net, "all-linear", [])
    assert [site.transposed for site in found] == [False, False, False, True]
    factors = {site.name: random_factors(3, i, site) for i, site in enumerate(found)}
    left = {name: own.left[name] for name, own in factors.items()}
    right = {name: own.right[name] for name, own in factors.items()}
    changes = adapters.products(left, right)
    wanted = {site.weight: before[site.weight] + 2.0 * site.change(changes[site.name]) for site in found}
    x = torch.rand(2, 2, 4, 4)
    adapted = Adapted(net, found, left, right, scaling=2.0).eval()
    said = adapted(x)
    for site in found:
        layer: Any = adapted.network.get_submodule(site.name)
        layer.merge()
        torch.testing.assert_close(layer.base_layer.weight.detach(), wanted[site.weight], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(adapted(x), said, atol=1e-4, rtol=1e-4)


@with_peft
@pytest.mark.parametrize("merge", [m if m == "svd" else pytest.param(m, marks=pytest.mark.slow) for m in MERGES])
def test_every_merge_keeps_the_laws(merge: Any) -> None:
    check_method(LoRA(merge=merge, train_head=merge != "basis"), whole_runs=merge == "sampled")


@with_peft
@pytest.mark.slow
@pytest.mark.parametrize("tricks", [{"batch_norm": "batch"}, {"batch_norm": "calibrated"}, {"proximal": 0.1}], ids=str)
def test_the_laws_hold_with_every_treatment_of_batch_norm(tricks: dict[str, Any]) -> None:
    check_method(LoRA(train_head=True, scaling=2.0), tricks=tricks, whole_runs=False)


@with_peft
def test_only_adapters_and_the_head_travel_and_the_base_takes_no_copies() -> None:
    made = digits(LoRA(rank=8, train_head=True))
    context, method = made.context, made.method
    state = method.init(context)
    message = method.extract(context, state, Client(0, 0, Size(0.25), 1, 8, 0))
    sent = sum(tensor.numel() for tensor in message.tensors.values())
    assert sent == 2 * (64 + 24) + 2 * (24 + 16) + (16 * 10 + 10)
    module = method.build(context.for_client(), message)
    assert {name for name, p in module.named_parameters() if p.requires_grad} == set(message.tensors)
    assert context.base is not None
    own = {tensor.data_ptr() for name, tensor in context.base.tensors.items() if "head" not in name}
    assert own <= {parameter.data_ptr() for parameter in module.parameters()}
    assert made.cost(Size(0.25)).parameters == sent


@with_peft
def test_memory_counts_the_base_once_and_gradients_for_adapters_alone() -> None:
    made = digits(LoRA(rank=8), training={"local_steps": 2, "batch_size": 8, "momentum": 0.0})
    context, state = made.context, made.method.init(made.context)
    message = made.method.extract(context, state, Client(0, 0, Size(0.25), 1, 8, 0))
    cost = message_cost(context.for_client(), made.method, message, made.example)
    adapter = 4 * sum(tensor.numel() for tensor in message.tensors.values())
    base = 4 * sum(tensor.numel() for tensor in context.start().values())
    # the message itself, then network, gradients, message and answer, the frozen network once, and activations
    assert cost["memory_bytes"] == adapter + 4 * adapter + base + cost["activation_bytes"]
    whole = digits(
        FedAvg(), devices={"capacities": [1.0]}, training={"local_steps": 2, "batch_size": 8, "momentum": 0.0}
    )
    sent = whole.method.extract(whole.context, whole.method.init(whole.context), Client(0, 0, Size(1.0), 1, 8, 0))
    assert (
        cost["memory_bytes"]
        < message_cost(whole.context.for_client(), whole.method, sent, whole.example)["memory_bytes"]
    )


@with_peft
def test_the_plan_tells_ranks_and_the_frozen_network() -> None:
    made = plan(digits(LoRA(rank=8)))
    small, large = made["groups"]
    assert (small["parameters"], large["parameters"]) == (2 * (88 + 40), 8 * (88 + 40))
    assert small["bytes_up"] < large["bytes_up"]
    assert small["inference_bytes"] == large["inference_bytes"] == 4 * (64 * 24 + 24 + 24 * 16 + 16 + 170)
    assert any("rank 2 at 0.25, 8 at 1.0, in 2 layers" in line and "8,520 bytes" in line for line in made["notices"])


@with_peft
def test_a_network_with_batch_norm_keeps_the_statistics_it_came_with(tmp_path: Path) -> None:
    net = convolved()
    with torch.no_grad():
        net[1].running_mean.uniform_()
    run = digits(LoRA(rank=8), net, training={"local_steps": 2, "batch_size": 8, "learning_rate": 0.5}).run(
        tmp_path / "r"
    )
    made = run.customize(1.0)
    assert torch.equal(made[1].running_mean, net[1].running_mean)
    assert torch.equal(made[5].weight, net[5].weight)
    assert not torch.equal(made[3].weight, net[3].weight)


# --- whole runs ---------------------------------------------------------------------------------------------

OPENED = """
import sys, json, torch, safetensors.torch
from anysize import models
from anysize.config.packages import load_torchvision
load_torchvision()
import peft
folder, options = sys.argv[1], json.loads(sys.argv[2])
base = models.build("mlp", (1, 8, 8), 10, options, seed=0)
opened = peft.PeftModel.from_pretrained(base, folder).eval()
x = safetensors.torch.load_file(folder + "/../x.safetensors")["x"]
with torch.no_grad():
    y = opened(x)
safetensors.torch.save_file({"y": y, "z": opened.merge_and_unload()(x).detach()}, folder + "/../y.safetensors")
"""


@with_peft
@pytest.mark.slow
@pytest.mark.parametrize("merge", ["svd", "stacking"])
def test_peft_opens_the_written_adapter_in_a_fresh_process(merge: Any, tmp_path: Path) -> None:
    """At a rank that no client trained; the data is not normalised, so that the network is the user's own."""
    options = {"hidden": [24, 16]}
    rate = {"local_steps": 4, "batch_size": 8, "learning_rate": 0.3}
    run = digits(LoRA(rank=8, merge=merge, train_head=True), training=rate, partition={"normalize": False}).run(
        tmp_path / "run"
    )
    x = torch.rand(3, 1, 8, 8)
    safetensors.torch.save_file({"x": x}, tmp_path / "x.safetensors")
    written = subprocess.run(
        [sys.executable, "-m", "anysize", "customize", tmp_path / "run", "--size", "0.5", "--to", tmp_path / "adapter"],
        capture_output=True,
        text=True,
    )
    assert written.returncode == 0, written.stderr
    assert "peft.PeftModel.from_pretrained opens it" in written.stdout.replace("\n", " ")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    subprocess.run([sys.executable, "-c", OPENED, tmp_path / "adapter", json.dumps(options)], check=True)
    said = safetensors.torch.load_file(tmp_path / "y.safetensors")
    torch.testing.assert_close(said["y"], said["z"], atol=1e-5, rtol=1e-5)
    if merge == "svd":  # stacking's whole sum has more directions than rank 4
        torch.testing.assert_close(said["y"], run.customize(0.5)(x).detach(), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(said["y"], run.experiment.model(x).detach(), atol=1e-3)


@with_peft
@pytest.mark.slow
def test_workers_give_the_same_bits_from_the_same_file_of_weights(tmp_path: Path) -> None:
    start = digits(LoRA()).model
    with torch.no_grad():
        weights = {name: tensor + 0.1 for name, tensor in tensors_of(start).items()}
    safetensors.torch.save_file(weights, tmp_path / "start.safetensors")
    file = tmp_path / "experiment.toml"
    file.write_text(
        'rounds = 2\nevaluate_every = 2\ndata = { name = "digits", clients = 6, validation = 0.2 }\n'
        'model = { name = "mlp", options = { hidden = [24, 16] }, weights = "start.safetensors" }\n'
        'devices = { capacities = [0.25, 1.0] }\nmethod = { name = "lora", train_head = true }\n'
        'training = { local_steps = 2, batch_size = 8 }\nevaluation = { on = ["test", "clients"] }\n'
    )
    one = az.run(file, out=tmp_path / "one", progress=False)
    other = az.run(
        file, overrides=["engine.name=processes", "engine.workers=2"], out=tmp_path / "other", progress=False
    )
    assert one.history[-1]["accuracy"] == other.history[-1]["accuracy"]
    assert (tmp_path / "one" / "clients.csv").read_bytes() == (tmp_path / "other" / "clients.csv").read_bytes()
    mine, theirs = (tensors_of(run.customize(0.5)) for run in (one, other))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    again = az.load(tmp_path / "one")
    assert all(torch.equal(mine[name], own) for name, own in tensors_of(again.customize(0.5)).items())


@with_peft
def test_a_run_without_its_file_of_weights_says_that_the_base_is_another(tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    named = {"name": "mlp", "options": {"hidden": [24, 16]}, "weights": str(start)}
    safetensors.torch.save_file({n: t + 0.1 for n, t in tensors_of(digits(LoRA()).model).items()}, start)
    digits(LoRA(), named, rounds=1).run(tmp_path / "run")
    start.unlink()
    with pytest.raises(
        MethodError, match=r"belong to another base: theirs has the fingerprint .* same file of model\.weights"
    ):
        az.load(tmp_path / "run").customize(0.25)


class Said(nn.Module):
    """A language model of transformers that gives its logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=20, n_positions=12, n_embd=16, n_layer=2, n_head=2, use_cache=False)
        self.network = GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=x).logits
        return logits


@with_peft
@pytest.mark.slow
def test_a_language_model_of_transformers_is_fine_tuned(tmp_path: Path) -> None:
    x = torch.randint(20, (48, 13))
    data = az.Data(train=(x[:, :-1], x[:, 1:]), test=(x[:, :-1], x[:, 1:]), classes=20)
    net = Said()
    made = Experiment(
        data=data,
        clients=4,
        model=net,
        pretrained=True,
        method=LoRA(rank=4, targets=["c_attn", "c_fc"]),
        task="next-token",
        devices={"capacities": [0.5, 1.0]},
        rounds=2,
        evaluate_every=2,
        training={"local_steps": 4, "batch_size": 4, "optimizer": "adam", "learning_rate": 0.02},
    )
    run = made.run(tmp_path / "run")
    changed = {n for n, t in tensors_of(run.customize(1.0)).items() if not torch.equal(t, tensors_of(net)[n])}
    assert changed == {
        f"network.transformer.h.{i}.{layer}.weight" for i in (0, 1) for layer in ("attn.c_attn", "mlp.c_fc")
    }
    assert run.adapter(tmp_path / "adapter", 0.5).difference < 1e-5


@with_peft
def test_attention_over_patches_is_fine_tuned(tmp_path: Path) -> None:
    model = {"name": "vit-tiny", "options": {"width": 16, "depth": 1, "heads": 2}}
    run = digits(LoRA(rank=4, merge="sampled"), model, rounds=1, evaluate_every=1).run(tmp_path / "run")
    assert set(run.history[-1]["accuracy"]) == {"0.25", "1.0"}


@with_peft
@pytest.mark.slow
def test_the_page_on_fine_tuning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    (base, text, _), (code,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("toml", "python"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert json.loads((tmp_path / "own-rank-8/adapter_config.json").read_text())["r"] == 8
    assert [size.label for size in names["run"].sizes] == ["0.125", "0.5", "1.0"]
    (tmp_path / "base.toml").write_text(base)
    (tmp_path / "fine-tuned.toml").write_text(text)
    trained = az.run("base.toml", overrides=["rounds=1"], progress=False)
    az.export(trained.customize(1.0), "base.safetensors", trained.experiment.signature)
    run = az.run("fine-tuned.toml", progress=False)
    assert set(run.history[-1]["accuracy"]) == {"0.125", "0.25", "0.5", "1.0"}


@with_peft
@pytest.mark.slow
def test_the_page_on_fine_tuning_adapts_a_network_of_transformers_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hugging_face = pytest.importorskip("test_hugging_face")
    from peft import PeftModel

    page = (Path(__file__).parents[1] / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
    hugging_face.write_reviews(tmp_path)
    hugging_face.bert().save_pretrained(tmp_path / "start")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned.toml").write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[2])
    run = az.run("tuned.toml", overrides=["rounds=1"], progress=False)
    run.adapter("adapter", 0.5)
    run.customize(0.5).save_pretrained("merged")
    kind = hugging_face.transformers.AutoModelForSequenceClassification
    batch = {"input_ids": torch.tensor([[2, 5, 7, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    adapted, merged, frozen = (
        network.eval()(**batch).logits
        for network in (
            PeftModel.from_pretrained(kind.from_pretrained("start"), "adapter"),
            kind.from_pretrained("merged"),
            kind.from_pretrained("start"),
        )
    )
    torch.testing.assert_close(adapted, merged)
    assert not torch.allclose(frozen, merged, atol=1e-4)


# --- what is refused ----------------------------------------------------------------------------------------


@with_peft
@pytest.mark.parametrize(
    "made, message",
    [
        (lambda: digits(LoRA(rank=17)), r"rank 17 is above the smaller dimension of network.linear2 \(at most 16\)"),
        (lambda: digits(LoRA(targets=("conv",))), "method.targets: unknown layer 'conv'"),
        (lambda: digits(LoRA(), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))), "no linear or convolutional layer"),
        (lambda: digits(LoRA(), tricks={"batch_norm": "local"}), 'batch_norm = "local" keeps norms on clients'),
    ],
    ids=["rank", "targets", "nothing", "local norms"],
)
def test_what_does_not_fit_the_network_is_refused_in_one_line(made: Callable[[], Experiment], message: str) -> None:
    experiment = made()
    with pytest.raises(AnysizeError, match=message) as caught:
        experiment.method.init(experiment.context)
    assert "\n" not in str(caught.value)


@with_peft
def test_a_network_that_has_adapters_of_peft_is_refused() -> None:
    peft = adapters.load_peft()
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    experiment = digits(LoRA(), peft.get_peft_model(network, peft.LoraConfig(target_modules=["1"])))
    with pytest.raises(MethodError, match="has adapters of peft already; give it without them") as caught:
        experiment.method.init(experiment.context)
    assert "\n" not in str(caught.value)


@with_peft
@pytest.mark.parametrize("what, words", [("folder", "is a folder; name the"), ("other", "needs .*; and 3 more$")])
def test_a_file_of_weights_that_does_not_fit_is_refused_in_one_line(what: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "base.safetensors"
    if what == "folder":
        file.mkdir()
    else:
        safetensors.torch.save_file(
            {name: t[..., :3].clone() for name, t in tensors_of(digits(LoRA()).model).items()}, file
        )
    experiment = digits(LoRA(), {"name": "mlp", "options": {"hidden": [24, 16]}, "weights": str(file)})
    with pytest.raises(ModelError, match=words) as caught:
        _ = experiment.model
    assert "\n" not in str(caught.value)


@with_peft
def test_an_adapter_of_another_base_is_refused() -> None:
    one, other = digits(LoRA()), digits(LoRA(), seed=1)
    message = one.method.extract(one.context, one.method.init(one.context), Client(0, 0, Size(0.25), 1, 8, 0))
    with pytest.raises(MethodError, match="belong to another base"):
        other.method.build(other.context.for_client(), message)
    untold = replace(message, ticket=replace(message.ticket, more={}))
    with pytest.raises(MethodError, match="belong to another base"):
        one.method.build(one.context.for_client(), untold)


def test_a_device_reads_no_weights_from_outside_its_folder(tmp_path: Path) -> None:
    from anysize.deploy.device_file import DeviceConfig
    from anysize.deploy.gate import refuse_foreign_weights

    device = DeviceConfig(name="cam", server="10.0.0.1:9092", data="shop:load")
    device._folder = tmp_path
    for named, allowed in (
        ("base.safetensors", True),
        ("../base.safetensors", False),
        ("/etc/base", False),
    ):
        asked = digits(LoRA(), {"name": "mlp", "weights": named}).config
        refuse_foreign_weights(FedAvg(), asked, device)
        if allowed:
            refuse_foreign_weights(LoRA(), asked, device)
            continue
        with pytest.raises(TrustError, match="outside this device's folder"):
            refuse_foreign_weights(LoRA(), asked, device)


def test_an_unknown_merge_is_refused() -> None:
    with pytest.raises(
        MethodError, match="merge = 'mean'; allowed: 'zero-padding', 'svd', 'stacking', 'basis', 'sampled'"
    ):
        LoRA(merge="mean")  # type: ignore[arg-type]


def test_a_missing_peft_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anysize.config.extras.find_spec", lambda name: None)
    made = digits(LoRA())
    with pytest.raises(MethodError, match=r"^lora: the method needs peft, not installed: pip install .*\[lora\]"):
        made.method.init(made.context)


def test_naming_the_method_does_not_import_peft() -> None:
    code = "import sys; from anysize.methods import LoRA; LoRA(); sys.exit('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@with_peft
def test_adapters_of_other_methods_are_refused(tmp_path: Path) -> None:
    run = digits(FedAvg(), rounds=1).run(tmp_path / "run")
    with pytest.raises(ConfigError, match="for method lora alone, and this run's is fedavg"):
        run.adapter(tmp_path / "new")


def test_layers_that_torch_reads_past_get_no_adapter() -> None:
    assert site_of("out", nn.MultiheadAttention(4, 2).out_proj) is None
    assert site_of("dilated", nn.Conv2d(2, 2, 3, dilation=2)) is None
    assert site_of("upward", nn.ConvTranspose2d(2, 2, 3)) is None
