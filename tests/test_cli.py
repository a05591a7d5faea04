"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import anysize as az
import small
from anysize.cli import printing
from anysize.config.toml import written

Call = Callable[..., tuple[int, str, str]]

OWN = """
import numpy as np
import torch
from torch import nn
import anysize as az

def raises(): raise ValueError("no data today")
def rubbish(): return 42
def one_device_raises(device):
    if device == 2: raise RuntimeError("sensor is broken")
    return az.Share(train=(np.zeros((4, 3), np.float32), [0, 1, 0, 1]), held_out=(np.zeros((2, 3), np.float32), [0, 1]))
def no_test(): return az.Data(train=(np.zeros((40, 3), np.float32), np.arange(40) % 2))
def not_a_network(): return "net"
def broken_network(): raise KeyError("layer")
class Pair(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(64, 10)
    def forward(self, x): return self.a(x.flatten(1)), x
class Wrong(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(100, 10)
    def forward(self, x): return self.a(x.flatten(1))
class Fixed(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(64, 32); self.b = nn.Linear(32, 10)
    def forward(self, x): return self.b(self.a(x.flatten(1)).reshape(-1, 32))
class Silent(az.Task):
    metric = "accuracy"
    class_axis = -1
    def loss(self, output, target): return torch.nn.functional.cross_entropy(output, target)
    def sums(self, output, target): return {"count": 1.0}
    def metrics(self, sums): return {"loss": 1.0}
class NoTask: pass
class NoMethod: pass
"""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line, called in this process."""
    return lambda *arguments: small.call(monkeypatch, capsys, *arguments)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment file, with code of the user's own beside it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "own_code.py").write_text(OWN)
    return small.file(folder)


@pytest.fixture(scope="module")
def finished(source: Path) -> Path:
    """The directory of a finished run."""
    return az.run(source, out=source.parent / "run").directory


def test_run_prints_a_table_and_writes_the_directory_and_its_report(call: Call, source: Path, tmp_path: Path) -> None:
    code, out, err = call("run", source, "--out", tmp_path / "run", "--set", "rounds=2")
    assert code == 0
    assert out.splitlines()[0].split() == ["size", "parameters", "MACs", "bytes", "per", "round", "accuracy"]
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["0.5", "1.0"]
    assert "2 rounds in" in out
    assert [line.split(":")[0] for line in err.splitlines() if line.startswith("round")] == ["round 1", "round 2"]
    names = {path.name for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert names == {
        "config.toml",
        "environment.json",
        "events.jsonl",
        "clients.csv",
        "state.safetensors",
        "report.html",
    }
    code, out, _ = call("run", source, "--out", tmp_path / "run", "--set", "rounds=3", "--resume")
    assert code == 0
    assert "1 round in" in out


def test_the_package_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "anysize", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["anysize", version("anysize")]


def test_the_default_directory_is_named_after_the_experiment(
    call: Call, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("run", source, "--set", "rounds=1", "--set", "name=mine")[0] == 0
    assert (tmp_path / "runs/mine/state.safetensors").is_file()


def test_plan_as_json_has_the_documented_keys(call: Call, source: Path) -> None:
    code, out, _ = call("plan", source, "--json")
    groups = json.loads(out)["groups"]
    assert code == 0
    assert [group["capacity"] for group in groups] == [0.5, 1.0]
    assert [group["clients"] for group in groups] == [3, 3]
    keys = {"parameters", "macs", "training_macs", "activation_bytes", "bytes_down", "bytes_up"}
    assert all(keys <= set(group) for group in groups)
    assert all(isinstance(group[key], int) for group in groups for key in keys)
    # A dense network of 64-16-8-10 has this many weights and biases; multiply-adds are its weights.
    code, out, _ = call("plan", source, "--json", "--set", "method.name=heterofl")
    full = json.loads(out)["groups"][-1]
    assert full["parameters"] == 64 * 16 + 16 + 16 * 8 + 8 + 8 * 10 + 10
    assert full["macs"] == 64 * 16 + 16 * 8 + 8 * 10


def test_plan_in_a_terminal_of_80_columns_breaks_no_word_and_shows_every_number(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.toml"
    groups = [
        {"name": "phone", "fraction": 0.5, "budget": {"parameters": 20_000}},
        {"name": "board", "fraction": 0.5, "budget": {"parameters": 20_001}},
    ]
    table = {"data": {"name": "digits", "clients": 100}, "devices": {"groups": groups}, "method": {"name": "heterofl"}}
    file.write_text(written({**table, "model": {"name": "small-cnn"}}))
    (planned, _) = json.loads(call("plan", file, "--json")[1])["groups"]
    monkeypatch.setattr(printing.out, "width", 80)
    lines = call("plan", file)[1].split("\n\nBudget")[0].splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if line.startswith(" group")]
    assert len(heads) == 2
    for word in ("clients", "size", "parameters", "training MACs", "activations", "bytes down", "bytes up", "shipped"):
        assert sum(word in head for head in heads) == 1
    rows = [line for line in lines if line.startswith(" phone")]
    assert f" {planned['parameters']:,} " in rows[0]
    assert rows[1].split()[-2:] == printing.bytes_text(planned["inference_bytes"]).split()
    assert sum("(as phone)" in line for line in lines) == 1


def test_plan_shows_the_width_that_is_really_trained(call: Call, source: Path) -> None:
    _, out, _ = call("plan", source, "--json", "--set", "method.name=fedavg")
    assert [group["width"] for group in json.loads(out)["groups"]] == [0.5, 0.5]


def test_plan_shows_budgets_what_is_shipped_and_groups_that_train_the_same(call: Call, tmp_path: Path) -> None:
    watch, phone, pad = {"inference_bytes": 3000.0}, {"inference_bytes": 1e6, "macs": 2e6}, {"macs": 2e6}
    budgets = {"watch": watch, "phone": phone, "pad": pad}
    groups = [{"name": name, "clients": 2, "budget": budget} for name, budget in budgets.items()]
    tables = small.config(method={"name": "heterofl"}).to_dict() | {"devices": {"groups": groups}}
    file = tmp_path / "budgets.toml"
    file.write_text(written(tables))
    _, out, _ = call("plan", file, "--json")
    planned = {group["name"]: group for group in json.loads(out)["groups"]}
    # A result of dense layers is its weights and biases, four bytes each.
    assert all(group["inference_bytes"] == 4 * group["parameters"] for group in planned.values())
    assert planned["watch"]["inference_bytes"] <= 3000 < planned["phone"]["inference_bytes"]
    assert {name: group["same_as"] for name, group in planned.items()} == {"watch": None, "phone": None, "pad": "phone"}
    _, out, _ = call("plan", file)
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()}
    assert "Budget, phone: macs 2.0 M, inference_bytes 1.0 MB." in out
    assert ["(as phone)" in lines[name] for name in budgets] == [False, False, True]
    assert "(as A): this group trains the same network" in out


def test_plan_names_the_data_groups_of_a_natural_split(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wards.py").write_text(
        "import numpy as np\nimport anysize as az\nfrom anysize.data import TensorPart\n"
        "def load():\n"
        "    x, y = np.ones((90, 8), dtype=np.float32), np.arange(90) % 3\n"
        "    part = TensorPart(x, y, group=np.array(['ward', 'field', 'lab'])[np.arange(90) // 30])\n"
        "    return az.Data(train=part, test=part)\n"
    )
    file = tmp_path / "natural.toml"
    data = {"name": "wards:load", "split": "natural", "domains": ["ward", "field"], "clients": 5}
    file.write_text(written({"data": data, "model": {"name": "mlp"}, "method": {"name": "heterofl"}}))
    code, out, err = call("plan", file)
    assert code == 0, err
    assert "Clients by data group: ward 3, field 2." in out


def test_plan_says_what_leaves_a_device(call: Call, source: Path) -> None:
    _, out, _ = call("plan", source)
    assert "Leaves a device: the trained tensors" in out
    assert "which classes it holds" not in out
    _, out, _ = call("plan", source, "--set", "tricks.classwise_head=true")
    assert "which classes it holds" in out


def test_inspect_prints_the_width_groups_and_a_verdict_per_method(call: Call, source: Path) -> None:
    code, out, _ = call("inspect", source)
    assert code == 0
    assert "16 units" in out
    assert "never narrowed" in out
    for method in ("fedavg", "fjord", "flanc", "heterofl", "sheterofl", "splitmix"):
        assert any(line.split()[:2] == [method, "yes"] for line in out.splitlines())
    found = json.loads(call("inspect", source, "--json")[1])
    widths = {"elf", "fedavg", "fjord", "flanc", "heterofl", "sheterofl", "splitmix"}
    assert widths <= {method["name"] for method in found["methods"]}
    assert {member["name"] for group in found["groups"] for member in group["members"]} >= {"network.linear1.weight"}


def test_inspect_says_kept_whole_for_what_model_keep_keeps(call: Call, source: Path) -> None:
    keep = ("--set", 'model.keep=["linear1"]')
    _, out, _ = call("inspect", source, *keep)
    assert "network.linear1: 16 units, kept whole" in out
    assert "frozen" not in out
    found = json.loads(call("inspect", source, "--json", *keep)[1])
    assert [group["name"] for group in found["groups"] if group["kept_whole"]] == ["network.linear1"]


def test_inspect_judges_every_method_by_its_own_tricks(call: Call, source: Path) -> None:
    model = ["--set", "model.name=small-cnn", "--set", "model.options={channels=[4,8]}"]
    verdicts = []
    for own in ("flanc", "heterofl"):
        found = json.loads(call("inspect", source, "--json", *model, "--set", f"method.name={own}")[1])
        verdicts.append(found["methods"])
    assert verdicts[0] == verdicts[1]


def test_inspect_says_why_a_method_cannot(call: Call, source: Path) -> None:
    code, out, _ = call("inspect", source, "--json", "--set", "model.name=own_code:Fixed", "--set", "model.options={}")
    assert code == 0
    methods = json.loads(out)["methods"]
    assert [method["name"] for method in methods if method["can"]] == ["fedhm", "lora"]  # they narrow nothing
    for method in methods:
        if method["can"]:
            continue
        other = {"elf": "no blocks that can be removed", "oat": "the model Fixed has no batch-norm"}
        assert other.get(method["name"], "own_code.py") in method["why"]
        assert not method["why"].startswith(f"{method['name']}: ")  # the table names it already


def test_evaluate_as_json_has_the_documented_shape(call: Call, finished: Path) -> None:
    code, out, _ = call("evaluate", finished, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["metric"] == "accuracy"
    assert found["accuracy"] == az.load(finished).history[-1]["accuracy"]
    one = json.loads(call("evaluate", finished, "--size", "0.5", "--json")[1])
    assert one["accuracy"] == {"0.5": found["accuracy"]["0.5"]}
    assert "0.75" in call("evaluate", finished, "--size", "0.75")[1]


@pytest.mark.parametrize("what, some", [("methods", "flanc"), ("models", "resnet18"), ("datasets", "digits")])
def test_lists_have_a_line_each_and_the_same_as_json(call: Call, what: str, some: str) -> None:
    code, out, _ = call(what, "--json")
    entries = json.loads(out)
    assert code == 0
    assert some in [entry["name"] for entry in entries]
    assert all(set(entry) == {"name", "summary"} and entry["summary"] for entry in entries)
    lines = call(what)[1].splitlines()
    assert [line.split()[0] for line in lines] == [entry["name"] for entry in entries]


def test_status_says_how_far_a_run_is(call: Call, finished: Path) -> None:
    code, out, _ = call("status", finished)
    assert code == 0
    assert out.startswith("small: round 3 of 3, finished\naccuracy at round 3: 0.5: ")
    assert json.loads(call("status", finished, "--json")[1])["state"] == "finished"


def test_report_is_written_anew(call: Call, finished: Path) -> None:
    code, out, _ = call("report", finished)
    assert code == 0
    assert Path(out.strip()).read_text(encoding="utf-8").startswith("<!")


@pytest.mark.parametrize("command", ["customize", "export"])
def test_customize_writes_a_checked_network(call: Call, finished: Path, tmp_path: Path, command: str) -> None:
    code, out, _ = call(command, finished, "--size", "0.5", "--to", tmp_path / "net.onnx")
    assert code == 0
    assert "size 0.5" in out
    assert (tmp_path / "net.onnx").stat().st_size > 1000
    code, out, _ = call(command, finished, "--size", "0.75", "--to", tmp_path / "net.safetensors")
    assert "never trained; its accuracy: anysize evaluate" in out


def test_customize_finds_the_largest_size_in_a_budget(call: Call, finished: Path, tmp_path: Path) -> None:
    _, out, _ = call("customize", finished, "--budget", "macs=1e3", "--to", tmp_path / "net.safetensors")
    assert "size 0.5" in out


def test_compare_prints_a_table_and_json(call: Call, source: Path, tmp_path: Path) -> None:
    arguments = ["compare", source, "--methods", "fedavg, heterofl", "--seeds", "0,1", "--out", tmp_path / "all"]
    arguments += ["--jobs", "1", "--set", "rounds=1"]
    code, out, _ = call(*arguments)
    assert code == 0
    assert out.splitlines()[0].split() == ["method", "0.5", "1.0", "mean", "of", "sizes", "best", "round"]
    rows = [line.split() for line in out.splitlines()[1:3]]
    assert [(row[0], row.count("±")) for row in rows] == [("fedavg", 3), ("heterofl", 4)]
    code, out, err = call(*arguments, "--json")
    assert json.loads(out) == json.loads((tmp_path / "all/compare.json").read_text())
    assert err.count("finished before") == 4


def test_compare_of_finished_runs_prints_what_comparing_them_printed(call: Call, source: Path, tmp_path: Path) -> None:
    options = ["--baseline", "fedavg", "--target", "0.05"]
    arguments = [source, "--methods", "fedavg,heterofl", "--out", tmp_path / "all", "--jobs", "1", "--set", "rounds=1"]
    _, printed, _ = call("compare", *arguments, *options, "--to", tmp_path / "table.tex")
    assert "\\toprule" in (tmp_path / "table.tex").read_text()
    code, again, _ = call("compare", tmp_path / "all")
    assert (code, again) == (0, printed)
    runs = [tmp_path / "all/fedavg/seed-0", tmp_path / "all/heterofl/seed-0"]
    code, again, _ = call("compare", *runs, *options)
    assert code == 0
    assert again.strip() == printed[: printed.rindex(str(tmp_path))].strip()
    assert call("compare", *runs, "--seeds", "1")[0] == 2


def test_names_with_signs_of_markup_are_printed_as_they_are(call: Call, tmp_path: Path) -> None:
    name = "[red]we[bold]ird ü 日本"
    groups = [{"name": "[/x]", "capacity": 0.5}, {"name": "b", "capacity": 1.0}]
    table = small.file(tmp_path, name=name, rounds=1, devices={"capacities": None, "groups": groups})
    code, _, err = call("run", table, "--out", tmp_path / "run")
    assert (code, "error" in err) == (0, False)
    assert call("status", tmp_path / "run")[1].startswith(f"{name}: round 1")
    assert "[/x]" in call("plan", table)[1]


def test_the_demo_file_is_a_valid_experiment() -> None:
    from importlib.resources import files

    config = az.load_config(Path(str(files("anysize") / "demo.toml")))
    assert (config.method.name, config.data.name, config.data.clients) == ("ladder", "digit-pairs", 20)


@pytest.mark.slow
def test_the_demo_beats_both_baselines_and_exports(call: Call, tmp_path: Path) -> None:
    code, printed, _ = call("demo", "--out", tmp_path / "demo")
    assert code == 0
    rows = {(row["method"], row["size"]): row for row in read_rows(tmp_path / "demo" / "compare.csv")}
    accuracy = {key: float(row["mean"]) for key, row in rows.items()}
    assert accuracy["ladder", "0.5"] > accuracy["FedAvg, weakest width", "0.25"] + 0.03
    assert accuracy["ladder", "1.0"] > accuracy["FedAvg, strong devices", "1.0"] + 0.05
    assert all(f"{value:.4f}" in printed for (_, size), value in accuracy.items() if size != "mean of sizes")
    assert {"net-0.25.onnx", "net-1.0.onnx", "compare.html"} <= {path.name for path in (tmp_path / "demo").iterdir()}
    assert (tmp_path / "demo" / "ladder" / "seed-0" / "report.html").is_file()


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# Refusals ------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[list[str], str]] = {
    "unknown key": (["training.learning_rat=1"], "unknown key 'learning_rat'; did you mean 'learning_rate'?"),
    "unknown method": (["method.name=flank"], "unknown method 'flank'; did you mean 'flanc'?"),
    "unknown option": (["method.orthogonalit=1.0"], "did you mean 'orthogonality'?"),
    "unknown model": (["model.name=mpl"], "unknown model 'mpl'; did you mean 'mlp'?"),
    "unknown data": (["data.name=digit"], "unknown data set 'digit'; did you mean 'digits'?"),
    "unknown task": (["task.name=clasification"], "did you mean 'classification'?"),
    "capacity above one": (["devices.capacities=[0.5,1.5]"], "devices.capacities[1]: given 1.5"),
    "capacity of nothing": (["devices.capacities=[0.0,1.0]"], "devices.capacities[0]: given 0.0"),
    "too many classes": (["data.split=classes", "data.classes_per_client=11"], "classes_per_client is 11"),
    "too many clients": (["data.clients=5000"], "5000 clients cannot share 288 samples"),
    "nobody": (["devices.participation=0.01"], "selects nobody"),
    "too small a budget": (
        ["devices={groups=[{name='tiny', budget={parameters=3}}]}"],
        "group 'tiny' can train no size; the smallest needs parameters = ",
    ),
    "no pair": (["nonsense"], "override 'nonsense': must be key=value"),
    "no key": (["=3"], "must be key=value"),
    "no table": (["training=5"], "training: given 5, must be a table"),
    "diverging": (["training.learning_rate=1e9", "rounds=9"], "diverged"),
    "engine": (["engine.name=flowr"], "did you mean 'flower'?"),
    "name": (["name=../x"], "must be usable as a folder name"),
    "data raises": (["data.name=own_code:raises"], "ValueError: no data today"),
    "data is rubbish": (["data.name=own_code:rubbish"], "returned a int; it must return an anysize.Data"),
    "data without test": (["data.name=own_code:no_test"], "the data has no test part"),
    "a device raises": (["data.name=own_code:one_device_raises", 'evaluation.on=["clients"]'], "sensor is broken"),
    "model raises": (["model.name=own_code:broken_network", "model.options={}"], "KeyError: 'layer'"),
    "model is rubbish": (["model.name=own_code:not_a_network", "model.options={}"], "it must return an nn.Module"),
    "model gives two": (["model.name=own_code:Pair", "model.options={}"], "returns a tuple; it must return one tensor"),
    "model does not fit": (["model.name=own_code:Wrong", "model.options={}"], "own_code.py"),
    "model not narrow": (["model.name=own_code:Fixed", "model.options={}"], "does not run"),
    "no module": (["model.name=nowhere:Net", "model.options={}"], "cannot import nowhere"),
    "no attribute": (["model.name=own_code:Net", "model.options={}"], "own_code has no 'Net'"),
    "task without metric": (["task.name=own_code:Silent"], "accuracy must be there too"),
    "no task": (["task.name=own_code:NoTask"], "not an anysize.Task"),
    "no method": (["method.name=own_code:NoMethod"], "not a dataclass derived from"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_a_line_or_two_and_exit_code_two(call: Call, source: Path, tmp_path: Path, case: str) -> None:
    overrides, message = WRONG[case]
    arguments = [part for override in overrides for part in ("--set", override)]
    code, out, err = call("run", source, "--out", tmp_path / "run", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    if case != "diverging":
        assert len(err.splitlines()) <= 3
        assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback_too(call: Call, source: Path, tmp_path: Path) -> None:
    code, _, err = call("--debug", "run", source, "--out", tmp_path / "run", "--set", "data.name=own_code:raises")
    assert code == 2
    assert "Traceback" in err
    assert "own_code.py" in err


ELSEWHERE: dict[str, tuple[list[str], str]] = {
    "no file": (["run", "nowhere.toml"], "no such experiment file"),
    "no option": (["plan", "{source}", "--bogus"], "No such option"),
    "no command": (["runn"], "No such command 'runn'. Did you mean 'run'?\n"),
    "both": (["run", "{source}", "--resume", "--overwrite"], "exclude each other"),
    "taken": (["run", "{source}", "--out", "{run}"], "--resume"),
    "a file": (["run", "{source}", "--out", "{source}"], "is a file"),
    "other files": (["run", "{source}", "--out", "{folder}"], "not a run's"),
    "nothing to resume": (["run", "{source}", "--out", "{folder}", "--resume"], "not a run's"),
    "changed": (["run", "{source}", "--out", "{run}", "--resume", "--set", "seed=5"], "seed: 0 -> 5"),
    "no run to evaluate": (["evaluate", "{folder}"], "holds no checkpoint"),
    "no run to report": (["report", "{folder}"], "events.jsonl"),
    "no status": (["status", "{folder}"], "holds no run"),
    "size": (["customize", "{run}", "--size", "half", "--to", "x.onnx"], "unknown size 'half'"),
    "width": (["evaluate", "{run}", "--size", "2"], "above 0 and at most 1"),
    "ending": (["customize", "{run}", "--size", "1", "--to", "x.onxx"], "did you mean '.onnx'?"),
    "folder": (["customize", "{run}", "--size", "1", "--to", "{folder}/none/x.onnx"], "does not exist"),
    "neither": (["customize", "{run}", "--to", "x.onnx"], "either --size 0.5 or --budget"),
    "unit": (["customize", "{run}", "--budget", "mac=1", "--to", "x.onnx"], "did you mean 'macs'?"),
    "amount": (["customize", "{run}", "--budget", "macs=lots", "--to", "x.onnx"], "not a number"),
    "nothing fits": (["customize", "{run}", "--budget", "macs=3", "--to", "x.onnx"], "no trained size fits"),
    "seeds": (["compare", "{source}", "--methods", "flanc", "--seeds", "a"], "not a whole number"),
    "methods": (["compare", "{source}", "--methods", "flanc,hetrofl"], "did you mean 'heterofl'?"),
    "no methods": (["compare", "{source}"], "no methods; give --methods"),
    "shard": (["compare", "{source}", "--methods", "flanc", "--shard", "3/2"], "I from 1 to N"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_every_command_refuses_in_a_line_or_two(call: Call, source: Path, finished: Path, case: str) -> None:
    arguments, message = ELSEWHERE[case]
    names = {"source": source, "run": finished, "folder": source.parent}
    state = (finished / "state.safetensors").read_bytes()
    code, _, err = call(*(argument.format(**names) for argument in arguments))
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert (finished / "state.safetensors").read_bytes() == state


def test_our_own_faults_are_told_from_the_users(call: Call, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: Any) -> None:
        raise IndexError("oops")

    monkeypatch.setattr("anysize.experiment.plan.plan", fault)
    code, _, err = call("plan", source)
    assert code == 1
    assert err == "error: IndexError: oops (a bug in anysize; --debug shows where)\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from anysize.cli import main; sys.argv = ['anysize', 'models']; main()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.wait(timeout=60)


def test_a_plan_names_no_statistics_of_a_network_without_batch_norm(call: Call, source: Path) -> None:
    network = ["--set", "model.name=mlp", "--set", "model.options={hidden=[8]}"]
    code, out, _ = call("plan", source, *network, "--json")
    made = json.loads(out)
    assert (code, made["statistics"]) == (0, [])
    assert not [what for what in made["leaves_the_device"] if "batch-norm" in what]


def test_every_command_writes_a_full_size_in_one_way(call: Call, source: Path) -> None:
    _, out, _ = call("plan", source, "--json")
    labels = [group["size"] for group in json.loads(out)["groups"]]
    _, out, _ = call("plan", source)
    rows = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in labels]
    assert [row[2] for row in rows] == labels
    assert labels[-1] == "1.0"
