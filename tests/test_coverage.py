"""Who trained what: parts that a method names, and their shares by domain and client in a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anysize as az
from anysize import report
from anysize.data import TensorPart
from anysize.methods import Client, FedAvg, FjORD, HeteroFL, Method, SHeteroFL, Size, SplitMix
from anysize.methods.capabilities import parts_of
from anysize.records.events import history
from anysize.wire import flatten
from test_golden import answers, context_of
from test_report import END, round_event, rows, save, start

METHODS = [FedAvg(), FedAvg("each"), HeteroFL(), SHeteroFL(), FjORD(), SplitMix(), SplitMix(base_width=0.125)]


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("widths", [[0.25], [0.5, 0.25], [0.25, 0.5, 1.0]])
def test_the_parts_of_updates_are_the_entries_that_they_change(method: Method[Any], widths: list[float]) -> None:
    context = context_of(method, [0.25, 0.5, 1.0], tricks={"classwise_head": False})
    state = method.init(context)
    updates = answers(context, method, state, [{"width": width, "samples": 2} for width in widths])
    before, _ = flatten(state)
    after, _ = flatten(method.aggregate(context, state, iter(updates)))
    changed = sum(int((after[name] != tensor).sum()) for name, tensor in before.items())
    clients = [Client(i, i, Size(width), 1, 2, 0) for i, width in enumerate(widths)]
    held = {name for client in clients for name in method.extract(context, state, client).parts}
    counts = parts_of(method, context)
    assert changed == sum(counts[name] for name in held)
    assert sum(tensor.numel() for tensor in before.values()) == sum(counts.values())


def test_a_domain_has_trained_what_any_of_its_clients_has_at_any_time(tmp_path: Path) -> None:
    def turn(client: int, domain: str, *parts: str) -> dict[str, Any]:
        about = {"client": client, "group": "group 0.25", "size": "0.25", "samples": 1, "loss": 1.0}
        return about | {"domain": domain, "parts": list(parts)}

    rounds = [
        round_event(1, clients=[turn(0, "ink", "a"), turn(1, "ink", "a"), turn(2, "paint", "a", "b")]),
        round_event(2, clients=[turn(0, "ink", "c"), turn(2, "paint", "a", "b")]),
        round_event(3, clients=[turn(2, "paint", "c")], void=True),  # too few answered: it changed nothing
    ]
    directory = save(tmp_path, [start(parts={"a": 10, "b": 20, "c": 70}), *rounds, END])
    report.write(directory)
    found = rows(directory, "trained-by-domain")
    assert [(row["domain"], row["clients"], row["parameters"], row["share"]) for row in found] == [
        ("ink", "2", "80", "0.8"),
        ("paint", "1", "30", "0.3"),
    ]
    by_client = {row["client"]: row for row in rows(directory, "trained-by-client")}
    assert {client: float(row["share"]) for client, row in by_client.items()} == {"0": 0.8, "1": 0.1, "2": 0.3}
    assert float(by_client["0"]["mean_share_a_round"]) == pytest.approx((0.1 + 0.7) / 2)


def test_statistics_over_clients_count_each_client_once(tmp_path: Path) -> None:
    directory = save(tmp_path, [start(), round_event(1), round_event(2), END])
    lines = [
        "round,client,group,size,samples,accuracy,loss",
        "2,0,group 0.25,0.25,9,0.5,1",
        "2,2,group 1.0,1.0,9,0.9,1",
    ]
    (directory / "clients.csv").write_text("\n".join(lines) + "\n")
    page = report.write(directory).read_text()
    found = {row["of"]: row for row in rows(directory, "coverage")}
    assert 'id="coverage"' in page
    assert float(found["parameters"]["mean"]) == (33_482 + 11_173_962) / 2
    assert float(found["parameters"]["spread"]) == (11_173_962 - 33_482) / 2
    assert (found["training_macs"]["least"], found["training_macs"]["most"]) == ("3000.0", "9000.0")
    assert float(found["accuracy"]["mean"]) == pytest.approx(0.7)


def test_metrics_by_domain_are_those_of_the_last_evaluated_round(tmp_path: Path) -> None:
    evaluated = round_event(2, scores=[0.5, 0.6, 0.7])
    for label, score in (("0.25", 0.4), ("1.0", 0.8)):
        evaluated["metrics"][label] |= {"accuracy/ink": score, "accuracy/paint": score / 2}
    directory = save(tmp_path, [start(), round_event(1), evaluated, END])
    report.write(directory)
    found = {(row["domain"], row["size"]): float(row["accuracy"]) for row in rows(directory, "by-domain")}
    assert found == {("ink", "0.25"): 0.4, ("paint", "0.25"): 0.2, ("ink", "1.0"): 0.8, ("paint", "1.0"): 0.4}


@pytest.mark.parametrize("method", [SplitMix(), SHeteroFL()], ids=repr)
def test_a_run_tells_what_each_domain_trained(method: Method[Any], tmp_path: Path) -> None:
    """The first domain's clients are the weak ones: slices leave most of the network to the other, bases do not."""
    x, y = torch.rand(40, 4), torch.arange(40) % 2
    data = az.Data(train=TensorPart(x, y, ["ink"] * 20 + ["paint"] * 20), test=(x, y))
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    made = az.Experiment(
        data=data,
        clients=4,
        partition={"split": "natural"},
        model=model,
        method=method,
        rounds=6,
        training={"batch_size": 8},
        devices={"capacities": [0.25, 1.0], "assignment": "order"},
    )
    directory = Path(made.run(tmp_path / "run").directory)
    report.write(directory)
    turns = [turn for round_ in history(directory) for turn in round_["clients"]]
    assert {turn["domain"] for turn in turns} == {"ink", "paint"}
    share = {row["domain"]: float(row["share"]) for row in rows(directory, "trained-by-domain")}
    narrow = 4 * 4 + 4 + 4 * 4 + 4 + 4 * 2 + 2  # a network of 4 hidden units
    full = 4 * 16 + 16 + 16 * 16 + 16 + 16 * 2 + 2
    assert share["paint"] == 1
    assert share["ink"] == pytest.approx(1.0 if isinstance(method, SplitMix) else narrow / full)
