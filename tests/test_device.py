"""A device's own file and its own data, and experiments whose data only the devices have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anysize as az
import small
from anysize import config as configs
from anysize.cli import fleet
from anysize.config.tables import ExperimentConfig
from anysize.deploy import device_file, own_data, selftest
from anysize.deploy import join as joining
from anysize.deploy.device_file import DeviceConfig, check_limits
from anysize.deploy.folder import lay_out, named, planned
from anysize.deploy.own_data import own_share
from anysize.errors import AnysizeError, ConfigError, DataError
from anysize.experiment.inspect import inspect
from anysize.experiment.plan import plan
from anysize.experiment.signature import Signature
from anysize.runs.experiment import Experiment

TABLES: dict[str, Any] = {
    "data": {"name": "devices"},
    "model": {"name": "mlp", "input": [1, 8, 8], "options": {"hidden": [16]}},
    "task": {"classes": 10},
    "method": {"name": "flanc"},
}


def own(**changes: Any) -> ExperimentConfig:
    """An experiment whose data only the devices have."""
    return configs.from_dict({key: {**TABLES.get(key, {}), **changes.get(key, {})} for key in {**TABLES, **changes}})


def signature(**changes: Any) -> Signature:
    about: dict[str, Any] = {
        "input_shape": (1, 8, 8),
        "tokens": False,
        "target_shape": (),
        "labels": True,
        "outputs": 10,
        "classes": 10,
        "class_names": None,
        "mean": None,
        "std": None,
    }
    return Signature(**(about | changes))


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceConfig:
    """A device whose function, in a module beside its file, gives whatever its options say."""
    (tmp_path / "frames.py").write_text(
        "import anysize as az\n"
        "import numpy as np\n"
        "def load(device, kind='good', count=20):\n"
        "    x = np.random.default_rng(0).random((count, 1, 8, 8), dtype=np.float32)\n"
        "    y = np.arange(count) % 10\n"
        "    if kind == 'class': y[3] = 10\n"
        "    if kind == 'negative': y[3] = -1\n"
        "    if kind == 'shape': x = x[:, :, :7]\n"
        "    if kind == 'number': y = y.astype(np.float32)\n"
        "    if kind == 'integer': x = (10 * x).astype(np.int64)\n"
        "    if kind == 'lazy': return az.Share(train=[(np.full((1, 8, 8), np.nan, np.float32), 1)] * 4)\n"
        "    if kind == 'pair': return x, y\n"
        "    if kind == 'held': return az.Share(train=(x[:5], y[:5]), held_out=(x[5:], y[5:]))\n"
        "    return az.Share(train=(x, y))\n"
        "def whole():\n"
        "    return az.Data(train=(np.zeros((4, 1, 8, 8), np.float32), [0, 1, 2, 3]))\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "frames", raising=False)
    (tmp_path / "device.toml").write_text(
        'name = "cam"\nserver = "localhost:9092"\ndata = "frames:load"\ncapacity = 0.5\nkey = "key"\n'
    )
    return device_file.load(tmp_path / "device.toml")


def with_options(device: DeviceConfig, **options: Any) -> DeviceConfig:
    return device.model_copy(update={"options": options})


# The file -------------------------------------------------------------------------------------------


@given(
    capacity=st.none() | st.floats(0.01, 1.0),
    macs=st.none() | st.floats(1.0, 1e12),
    options=st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.text(max_size=5), max_size=3),
    name=st.text(min_size=1, max_size=8).filter(str.strip),
)
def test_a_device_comes_back_from_its_file(
    capacity: float | None, macs: float | None, options: dict[str, Any], name: str
) -> None:
    budget = None if capacity is not None or macs is None else {"macs": macs}
    device = DeviceConfig(
        name=name, server="[::1]:9092", data="a.b:c", options=options, capacity=capacity, budget=budget, allow=["m:f"]
    )
    assert device_file.loads(device_file.dumps(device)) == device


def test_all_that_is_wrong_with_a_file_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        device_file.loads('name = ""\nserver = "localhost"\ndata = "frames"\nclients = 3\nbudgt = {}\ncapacity = 2')
    text = str(caught.value)
    assert "the device's file has 6 problems" in text
    assert "server: given 'localhost', must be \"host:port\"" in text
    assert "data: given 'frames', must be \"package.module:function\"" in text
    assert "unknown key 'budgt'; did you mean 'budget'?" in text
    assert "belongs to" not in text  # that is about another file
    assert "capacity: given 2, must be above 0 and at most 1" in text


def test_a_capacity_and_a_budget_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="a capacity or a budget, not both"):
        DeviceConfig(name="cam", server="a:1", data="a:b", capacity=0.5, budget={"macs": 1.0})
    with pytest.raises(ConfigError, match="--measure"):
        check_limits(DeviceConfig(name="cam", server="a:1", data="a:b"))


def test_names_in_the_file_are_relative_to_it(device: DeviceConfig, tmp_path: Path) -> None:
    assert device.path("key") == tmp_path.resolve() / "key"


def test_the_file_in_the_docs_is_one() -> None:
    page = (Path(__file__).parents[1] / "docs" / "trust.md").read_text(encoding="utf-8")
    text = page.partition("```text\n")[2].partition("```")[0]
    device = device_file.loads(text)
    assert device.capacity == 0.25
    assert set(device.model_dump(exclude_none=True)) == set(DeviceConfig.model_fields) - {"budget"}


# Its data -------------------------------------------------------------------------------------------


def test_a_device_gives_its_own_data_and_holds_a_part_out(device: DeviceConfig) -> None:
    share = own_share(device, own(data={"validation": 0.25}), signature())
    assert share.held_out is not None
    assert (len(share.train), len(share.held_out)) == (15, 5)
    everything = torch.cat([share.train.batch(torch.arange(15))[0], share.held_out.batch(torch.arange(5))[0]])
    expected = np.random.default_rng(0).random((20, 1, 8, 8), dtype=np.float32)
    assert sorted(everything.flatten(1).sum(1).tolist()) == pytest.approx(sorted(expected.sum((1, 2, 3)).tolist()))
    again = own_share(device, own(data={"validation": 0.25}), signature())
    assert torch.equal(again.train.labels(), share.train.labels())


def test_what_a_device_holds_out_itself_is_left_alone(device: DeviceConfig) -> None:
    share = own_share(with_options(device, kind="held"), own(data={"validation": 0.5}), signature())
    assert share.held_out is not None
    assert (len(share.train), len(share.held_out)) == (5, 15)


@pytest.mark.parametrize(
    "kind, said",
    [
        ("class", "classes lie outside 0 to 9"),
        ("negative", "classes lie outside 0 to 9"),
        ("shape", r"a sample has shape \(1, 7, 8\); the network takes \(1, 8, 8\)"),
        ("number", "targets are numbers; the task takes classes"),
        ("integer", "inputs are integers; the network takes numbers"),
        ("lazy", "inputs hold values that are not finite"),
        ("pair", "it must return an anysize.Share"),
    ],
)
def test_data_that_does_not_fit_is_refused(device: DeviceConfig, kind: str, said: str) -> None:
    with pytest.raises(AnysizeError, match=said):
        own_share(with_options(device, kind=kind), own(), signature())


def test_a_function_for_a_whole_data_set_is_none_for_a_device(device: DeviceConfig) -> None:
    with pytest.raises(DataError, match="its first parameter must be `device`"):
        own_share(device.model_copy(update={"data": "frames:whole"}), own(), signature())


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    about = signature(input_shape=(4,), tokens=True, target_shape=(4,), outputs=5, classes=5)
    good = az.Share(train=(np.full((3, 4), 4), np.full((3, 4), 4))).train
    bad = az.Share(train=(np.full((3, 4), 5), np.full((3, 4), 4))).train
    assert own_data.unfit(good, about) == []
    assert own_data.unfit(bad, about) == ["tokens lie outside 0 to 4, which the network knows"]


# data.name = "devices" --------------------------------------------------------------------------------


def test_an_experiment_without_data_says_what_the_server_must_know() -> None:
    config = configs.from_dict(
        {"data": {"name": "devices"}, "model": {"name": "mlp"}, "method": {"name": "fedavg"}, "task": {}}
    )
    with pytest.raises(ConfigError, match=r"(?s)model.input: missing.*task.classes: missing"):
        _ = Experiment.from_config(config).signature


def test_it_is_evaluated_on_the_devices_unless_there_is_a_test_set() -> None:
    assert own().evaluation.on == ("clients",)
    assert own().data.validation == 0.1
    assert own(data={"validation": 0.0}).data.validation == 0.0
    assert own(data={"test": "digits"}).evaluation.on == ("test", "clients")
    assert configs.loads(configs.dumps(own())) == own()
    with pytest.raises(ConfigError, match=r"the server has no test set; name one in data\.test"):
        own(evaluation={"on": ["test"]})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"devices": {"redraw": "round"}}, "devices.redraw"),
        ({"devices": {"assignment": "group"}}, "devices.assignment"),
        ({"devices": {"available": 0.5}}, "devices.available"),
        ({"data": {"split": "dirichlet", "alpha": 0.5}}, "data.split"),
        ({"data": {"fraction": 0.5}}, "data.fraction"),
        ({"data": {"options": {"a": 1}}}, "data.options"),
        ({"data": {"normalize": True}}, "data.normalize"),
        ({"tricks": {"weighting": "samples"}}, r'tricks\.weighting: .*devices\.share = \["samples"\]'),
        ({"tricks": {"classwise_head": True}}, r'tricks\.classwise_head: .*devices\.share = \["labels"\]'),
    ],
)
def test_what_needs_data_at_the_server_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        own(**changes)


def test_a_data_set_brings_its_own_test_part() -> None:
    with pytest.raises(ConfigError, match=r"data\.test: only for name = \"devices\""):
        small.config(data={"test": "digits"})


def test_a_simulation_says_that_it_needs_a_fleet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs on a fleet"):
        az.run(Experiment.from_config(own()), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_plan_and_inspect_need_no_data() -> None:
    experiment = Experiment.from_config(own())
    made = plan(experiment)
    assert [group["name"] for group in made["groups"]] == ["0.25", "0.5", "0.75", "1.0"]
    assert [group["clients"] for group in made["groups"]] == [None] * 4
    known = plan(small.experiment(model={"options": {"hidden": [16]}}, devices={"capacities": [0.25, 1.0]}))
    assert made["groups"][0]["parameters"] == known["groups"][0]["parameters"]
    assert any("all devices count equally" in notice for notice in made["notices"])
    verdicts = {method["name"]: method for method in inspect(experiment)["methods"]}
    assert verdicts["fedavg"]["can"]
    assert "devices.share" in verdicts["heterofl"]["why"]


def test_expected_devices_are_counted_in_the_plan() -> None:
    made = plan(Experiment.from_config(own(data={"clients": 12}, devices={"capacities": [0.5, 1.0]})))
    assert [group["clients"] for group in made["groups"]] == [6, 6]


def test_the_signature_of_other_tasks() -> None:
    text = own(task={"name": "next-token", "classes": 40}, model={"name": "text-lstm", "input": [20], "options": {}})
    about = Experiment.from_config(text).signature
    assert (about.input_shape, about.tokens, about.target_shape, about.labels) == ((20,), True, (20,), True)
    assert (about.outputs, about.classes) == (40, 40)
    tables = {key: value for key, value in TABLES.items() if key != "task"}
    numbers = configs.from_dict({**tables, "task": {"name": "regression", "target": [3]}})
    about = Experiment.from_config(numbers).signature
    assert (about.target_shape, about.labels, about.outputs, about.classes) == ((3,), False, 3, None)
    missing = configs.from_dict({**tables, "task": {"name": "regression"}})
    with pytest.raises(ConfigError, match=r"task\.target: missing"):
        _ = Experiment.from_config(missing).signature


def test_the_servers_own_test_set_also_says_what_the_data_is_like() -> None:
    config = own(data={"test": "digits"}, model={"input": None}, task={"classes": None})
    experiment = Experiment.from_config(config)
    assert experiment.signature.input_shape == (1, 8, 8)
    assert experiment.signature.classes == 10
    assert experiment.data is None


def test_more_classes_than_the_data_shows_can_be_declared() -> None:
    assert small.experiment(task={"classes": 12}).signature.outputs == 12
    with pytest.raises(ConfigError, match=r"task\.classes: given 9, but the data has 10"):
        _ = small.experiment(task={"classes": 9}).signature


_TRIES = """
import sys
from anysize.deploy import process
process.main("trial", [sys.argv[1], "0.5"])
print([name for name in ("torch._dynamo.utils", "sympy.core") if name in sys.modules])
import torch, torch._dynamo.utils, sympy.logic.boolalg
print(torch.compile(lambda x: x + 1, backend="eager", dynamic=True)(torch.ones(2)))
sizes = {0: torch.export.Dim("n", min=2, max=9)}
made = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes=(sizes,))
print(made.module()(torch.ones(7, 3)).shape, sympy.logic.boolalg.true is sympy.true)
"""


@pytest.mark.slow
def test_a_device_trains_without_compiler_and_algebra_which_still_work(tmp_path: Path) -> None:
    lay_out(tmp_path / "fleet", planned(None, named(["board=0.5"]), [], 8123, None))
    file = tmp_path / "fleet" / "devices" / "board" / "device.toml"
    done = subprocess.run([sys.executable, "-c", _TRIES, str(file)], check=True, capture_output=True, text=True)
    told = done.stdout.splitlines()
    assert list(json.loads(told[0])) == ["bytes"]
    assert told[1:] == ["[]", "tensor([2., 2.])", "torch.Size([7, 2]) True"]


def test_the_process_that_watches_over_a_device_does_not_load_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "device.toml"
    file.write_text('name = "cam"\nserver = "localhost:1"\ndata = "shop:load"\n')
    code = (
        f"import sys; sys.argv = ['anysize', 'join', {str(file)!r}]\n"
        "from anysize.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "give its file a capacity or a budget" in done.stderr
    assert done.stdout == "2 False\n"


def test_after_it_measured_a_device_joins_in_a_process_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(selftest, "measured", lambda file, **options: None)
    monkeypatch.setattr(joining, "join", lambda file, **options: None)
    monkeypatch.setattr(os, "execv", lambda path, arguments: became.append(arguments))
    fleet.join(Path("cam.toml"), insecure=True, measure=True)
    assert became == (
        [[sys.executable, "-m", "anysize", "join", "cam.toml", "--insecure"]] if os.name == "posix" else []
    )
