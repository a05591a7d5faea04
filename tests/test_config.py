"""The experiment file: what it accepts, what it refuses and how, and that it comes out as it went in."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anysize.config.devices import DevicesConfig, DistributionConfig
from anysize.config.files import changes, dumps, from_dict, load, loads
from anysize.config.tables import ExperimentConfig, MethodConfig, TrainingConfig
from anysize.config.toml import differences
from anysize.errors import ConfigError

SMALLEST = """
[data]
name = "digits"
clients = 20
[model]
name = "small-cnn"
[method]
name = "flanc"
"""

COMPLETE = """
name = "fashion-flanc"
seed = 0
rounds = 200
evaluate_every = 10

[data]
name = "fashion-mnist"
clients = 100
split = "classes"
classes_per_client = 3
validation = 0.1
augment = []
options = {}

[model]
name = "flanc-cnn"
weights = "start.safetensors"
keep = ["stem"]
frozen = ["head.*"]
input = [1, 28, 28]

[devices]
capacities = [0.25, 0.5, 0.75, 1.0]
fractions = [0.25, 0.25, 0.25, 0.25]
capacity_of = "width"
redraw = "never"
participation = 0.1

[method]
name = "flanc"
orthogonality = 10.0
input_fraction = { default = 0.125, "layer1.0.conv1" = 0.25 }

[training]
optimizer = "sgd"
local_epochs = 1
batch_size = 32
learning_rate = 0.01
momentum = 0.9
weight_decay = 1e-4
schedule = "step"
milestones = [0.5]
gamma = 0.1

[task]
name = "classification"

[tricks]
masked_loss = true
classwise_head = true
batch_norm = "batch"

[evaluation]
on = ["test", "clients"]

[engine]
name = "processes"
workers = 2
accelerator = "auto"
"""


def smallest(**tables: dict[str, Any]) -> dict[str, Any]:
    """The smallest experiment, with some tables' keys added."""
    found: dict[str, Any] = tomllib.loads(SMALLEST)
    for name, table in tables.items():
        found[name] = {**found.get(name, {}), **table}
    return found


def problems_of(tables: dict[str, Any], *overrides: str) -> list[str]:
    """The lines of the error that an experiment gives."""
    with pytest.raises(ConfigError) as caught:
        from_dict(tables, overrides)
    return str(caught.value).split("\n")


# What it accepts


def test_the_smallest_file_gets_the_same_defaults_for_every_method() -> None:
    flanc, fedavg = loads(SMALLEST), loads(SMALLEST, ["method.name=fedavg"])
    assert flanc.training == fedavg.training
    training = flanc.training
    assert (training.local_epochs, training.local_steps, training.batch_size) == (1, None, 32)
    assert (training.learning_rate, training.momentum, training.weight_decay) == (0.01, 0.9, 1e-4)
    assert flanc.devices.capacities == (0.25, 0.5, 0.75, 1.0)
    assert (flanc.devices.participation, flanc.devices.clients_per_round) == (1.0, None)
    assert all(value is None for value in flanc.tricks.model_dump().values())


def test_every_key_of_the_complete_example_arrives() -> None:
    config = loads(COMPLETE)
    written = tomllib.loads(COMPLETE)
    assert config.method.options == {key: written["method"][key] for key in ("orthogonality", "input_fraction")}
    assert config.model.input == (1, 28, 28)
    assert config.model.frozen == ("head.*",)
    assert config.evaluation.on == ("test", "clients")
    given = config.to_dict()
    for table, keys in written.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            found = given[table][key]
            assert (list(found) if isinstance(found, tuple) else found) == value, f"{table}.{key}"


def test_integers_are_accepted_where_numbers_are_asked_for() -> None:
    assert from_dict(smallest(devices={"capacities": [1]})).devices.capacities == (1.0,)


def test_method_options_may_be_given_flat_or_gathered() -> None:
    assert MethodConfig(name="flanc", a=1) == MethodConfig(name="flanc", options={"a": 1})


def test_the_order_of_capacities_is_kept() -> None:
    assert DevicesConfig(capacities=[1.0, 0.25, 0.5]).capacities == (1.0, 0.25, 0.5)


def test_a_distribution_brings_its_numbers_and_keeps_those_given() -> None:
    for options in ({"sigma": 0.2}, DistributionConfig(sigma=0.2)):
        devices = DevicesConfig(distribution="log-normal", distribution_options=options)
        assert devices.distribution_options == DistributionConfig(median=0.4, sigma=0.2)
        assert len(devices.capacities or ()) == 8


def test_a_config_cannot_be_changed() -> None:
    config = loads(SMALLEST)
    with pytest.raises(ValueError, match="frozen"):
        config.training.batch_size = 64


# Files


def test_a_file_without_a_name_is_called_by_its_own_and_knows_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(SMALLEST)
    config = load(file)
    assert config.name == "sweep"
    assert config.folder == tmp_path.resolve()
    assert config.path("start.safetensors") == tmp_path.resolve() / "start.safetensors"
    assert config.path("/elsewhere/x") == Path("/elsewhere/x")


def test_where_a_file_lies_does_not_make_an_experiment_another(tmp_path: Path) -> None:
    assert from_dict(smallest(), folder=tmp_path) == from_dict(smallest())
    assert from_dict(smallest()) != from_dict(smallest(), ["seed=1"])


def test_reading_leaves_the_given_tables_untouched() -> None:
    tables = smallest(training={"local_epochs": 2})
    from_dict(tables, ["training.local_steps=3"])
    assert tables == smallest(training={"local_epochs": 2})


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "no such experiment file"),
        (b"rounds = 10\nname = digits\n", r"line 2[\s\S]*> name = digits"),
        (b"name = '\xff'", "not UTF-8"),
        (b"rounds = 1\nrounds = 2", "line 2"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "experiment.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load(file)
    assert str(file) in str(caught.value)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


# What it refuses

BAD_VALUES: list[tuple[str, dict[str, Any], str]] = [
    (
        "training",
        {"learnign_rate": 0.1},
        "training: unknown key 'learnign_rate'; did you mean 'learning_rate'?",
    ),
    ("training", {"rounds": 3}, "'rounds' belongs to the top level"),
    ("data", {"learning_rate": 0.1}, "'learning_rate' belongs to [training]"),
    ("compare", {"sseds": [0]}, "compare: unknown key 'sseds'; did you mean 'seeds'?"),
    ("privacy", {"epsilon": 1.0}, "privacy: unknown key 'epsilon'. Known: clip, count_noise, delta, noise, quantile"),
    ("devcies", {}, "did you mean 'devices'?"),
    ("training", {"batch_size": "32"}, "training.batch_size: given '32', must be an integer"),
    ("training", {"batch_size": True}, "training.batch_size: given true, must be an integer"),
    ("training", {"batch_size": 1.5}, "training.batch_size: given 1.5, must be an integer"),
    ("training", {"learning_rate": math.nan}, "training.learning_rate: given nan, must be a finite number"),
    ("training", {"learning_rate": 0}, "training.learning_rate: given 0, must be above 0"),
    ("training", {"momentum": 1.0}, "training.momentum: given 1.0, must be at least 0 and below 1"),
    ("training", {"schedule": "stepp"}, "did you mean 'step'? Known: constant, cosine, step"),
    ("training", {"schedule": "step"}, "training.milestones: missing"),
    ("training", {"milestones": 0.5}, "training.milestones: given 0.5, must be a list"),
    ("training", {"milestones": [0.5, -1]}, "training.milestones[1]: given -1, must be above 0"),
    ("training", {"local_epochs": 1, "local_steps": 5}, "give one of the two"),
    ("training", {"local_steps": 0}, "training.local_steps: given 0, must be 1 or more"),
    ("training", {"final_learning_rate": 1.0}, "must be at most learning_rate, 0.01"),
    ("data", {"split": "classes"}, 'data.classes_per_client: missing; split = "classes" needs it'),
    ("data", {"split": "dirichlet"}, "data.alpha: missing"),
    ("data", {"alpha": 0.1}, 'split = "iid" does not use it; set split = "dirichlet"'),
    ("data", {"split": "dirichlet", "alpha": 0.0}, "data.alpha: given 0.0, must be above 0"),
    ("data", {"unbalance": 0.5}, 'given 0.5, but only split = "classes" uses it'),
    ("data", {"groups_per_client": 2}, 'given 2, but only split = "natural" uses it'),
    ("data", {"domains": ["a"]}, "given ['a'], but only split = \"natural\" uses it"),
    ("data", {"clients": 0}, "data.clients: given 0, must be 1 or more"),
    ("data", {"validation": 1.0}, "data.validation: given 1.0, must be at least 0 and below 1"),
    ("data", {"options": {"since": None}}, "since is a NoneType: leave it out"),
    ("data", {"options": 3}, "data.options: given 3, must be a table"),
    ("model", {"name": " "}, "model.name: given ' ', must not be empty"),
    ("model", {"heads": 4}, "model.heads: given 4, must be 'within' or 'whole'"),
    ("model", {"input": [1, 0]}, "model.input[1]: given 0, must be 1 or more"),
    ("method", {"rank": math.nan}, "rank is not a number"),
    ("tricks", {"batch_norm": "trackd"}, "did you mean 'tracked'?"),
    ("tricks", {"masked_loss": 1}, "tricks.masked_loss: given 1, must be true or false"),
    ("evaluation", {"on": []}, "evaluation.on: given [], must hold at least one value"),
    ("evaluation", {"on": ["test", "test"]}, "test occurs more than once"),
    ("evaluation", {"on": ["clients"]}, "set data.validation above 0"),
    ("engine", {"name": "proceses"}, "did you mean 'processes'?"),
    ("engine", {"workers": 0}, "engine.workers: given 0, must be 1 or more"),
    ("devices", {"capacities": []}, "devices.capacities: given [], must hold at least one value"),
    (
        "devices",
        {"capacities": [0.5, 1.5]},
        "devices.capacities[1]: given 1.5, must be above 0 and at most 1",
    ),
    ("devices", {"capacities": [0.0]}, "devices.capacities[0]: given 0.0, must be above 0 and at most 1"),
    ("devices", {"capacities": [0.5, 0.5]}, "0.5 occurs more than once"),
    ("devices", {"capacities": 0.5}, "devices.capacities: given 0.5, must be a list"),
    ("devices", {"fractions": [0.5, 0.6]}, "must sum to 1; these sum to 1.1"),
    ("devices", {"fractions": [0.5, 0.5]}, "devices.fractions: given 2 values for 4 capacities"),
    ("devices", {"participation": 0.0}, "devices.participation: given 0.0, must be above 0 and at most 1"),
    ("devices", {"participation": 0.1, "clients_per_round": 2}, "give one of the two"),
    ("devices", {"cover": True}, 'devices.cover: needs redraw = "round"'),
    ("devices", {"macs_per_second": [1.0]}, "devices.macs_per_second: given 1 values for 4 capacities"),
    ("devices", {"macs_per_second": -1}, "must be a number above 0, or a list"),
    ("devices", {"available": 0}, "must be a number above 0 and at most 1, or a list"),
    ("devices", {"bytes_per_second": 1, "bytes_per_second_up": 1}, "give one kind"),
    ("devices", {"distribution": "lognormal"}, "did you mean 'log-normal'?"),
    ("devices", {"distribution": "step", "fractions": [0.25] * 4}, "give one of the two"),
    ("devices", {"distribution_options": {"sigma": 1.0}}, "given without devices.distribution"),
    ("devices", {"distribution": "step", "distribution_options": {"sigma": 1.0}}, "it uses step"),
    ("devices", {"distribution": "two-type", "distribution_options": {"weak": 1.0}}, "smaller than strong"),
    ("devices", {"assignment": "group", "fractions": [0.25] * 4}, "leave out fractions"),
    ("devices", {"groups": [{"name": "a"}]}, "devices.groups[0]: must have either a capacity or a budget"),
    ("devices", {"groups": [{"capacity": 1.0}]}, "devices.groups[0].name: missing"),
    (
        "devices",
        {"groups": [{"name": "a", "capacity": 1.0, "budget": {"macs": 1}}]},
        "must have either a capacity or a budget",
    ),
    ("devices", {"groups": [{"name": "a", "budget": {}}]}, "must limit at least one of parameters, macs"),
    ("devices", {"groups": [{"name": "a", "budget": {"mac": 1}}]}, "groups[0].budget: unknown key 'mac'"),
    ("devices", {"groups": [{"name": "a", "capacity": 1.0}] * 2}, "the name 'a' occurs 2 times"),
    ("devices", {"groups": [{"name": "a", "capacity": 1.0}], "capacities": [1.0]}, "give one of the two"),
    ("devices", {"groups": [{"name": "a", "capacity": 1.0, "fraction": 0.5}]}, "these sum to 0.5"),
    ("devices", {"groups": [{"name": "a", "capacity": 1.0, "fraction": 0.5, "clients": 2}]}, "not both"),
    ("devices", {"groups": [{"name": "a", "capacity": 1.0}], "available": [1.0]}, "give it in each group"),
]


@pytest.mark.parametrize("table, keys, words", BAD_VALUES)
def test_a_bad_value_is_refused_with_its_key_and_what_is_allowed(table: str, keys: dict[str, Any], words: str) -> None:
    lines = problems_of(smallest(**{table: keys}))
    assert len(lines) == 1, lines
    assert words in lines[0]


@pytest.mark.parametrize("key, value", [("rounds", 0), ("seed", -1), ("evaluate_every", 0), ("name", "a/b")])
def test_a_bad_top_level_value_is_refused(key: str, value: object) -> None:
    assert f"{key}: given {value!r}, must be" in problems_of({**smallest(), key: value})[0]


def test_a_missing_table_says_what_to_add() -> None:
    lines = problems_of({"model": {}, "data": {"name": "digits"}})
    assert "data.clients: missing" in lines[1]
    assert 'model.name: missing; add name = "..." to [model]' in lines[2]
    assert 'method: missing; add a table [method] with name = "..."' in lines[3]


def test_clients_may_be_left_out_where_the_data_says_who_has_what() -> None:
    tables = smallest(data={"split": "natural"})
    del tables["data"]["clients"]
    assert from_dict(tables).data.clients is None


def test_all_problems_of_all_tables_and_overrides_come_at_once() -> None:
    tables = smallest(
        data={"fraction": 2.0},
        training={"lr": 0.1, "momentum": 3},
        devices={"fractions": [0.5], "participation": 7},
        engine={"name": "ray"},
    )
    lines = problems_of({**tables, "rounds": 0}, "training", "rounds.x=1")
    assert lines[0] == "the experiment has 9 problems:"
    assert len(lines) == 10
    for key in (
        "override 'training'",
        "override rounds.x",
        "rounds:",
        "data.fraction:",
        "training: unknown key",
    ):
        assert sum(line.startswith(f"  - {key}") for line in lines) == 1, key


def test_a_table_made_by_hand_gives_the_same_lines_as_a_file() -> None:
    with pytest.raises(ConfigError, match=r"\[training\]: training\.batch_size: given 0, must be 1 or more"):
        TrainingConfig(batch_size=0)
    with pytest.raises(ConfigError, match=r"unknown key 'capacitys'; did you mean 'capacities'"):
        DevicesConfig(capacitys=[1.0])
    with pytest.raises(ConfigError, match=r"data\.name: missing"):
        ExperimentConfig(data={}, model={"name": "mlp"}, method={"name": "fedavg"})


# Overrides


@pytest.mark.parametrize(
    "text, path, value",
    [
        ("training.learning_rate=0.1", ("training", "learning_rate"), 0.1),
        ("rounds = 7", ("rounds",), 7),
        ("model.name=resnet18", ("model", "name"), "resnet18"),
        ("model.name='resnet18'", ("model", "name"), "resnet18"),
        ("data.name=my.module:load", ("data", "name"), "my.module:load"),
        ("name=2024-01-01", ("name",), "2024-01-01"),
        ("devices.capacities=[0.5, 1]", ("devices", "capacities"), (0.5, 1.0)),
        ("tricks.masked_loss=false", ("tricks", "masked_loss"), False),
        ("data.options={size=8}", ("data", "options", "size"), 8),
        ("method.rank=0.5", ("method", "rank"), 0.5),
        ('method.rank."layer1.0"=0.5', ("method", "rank", "layer1.0"), 0.5),
        ("model.options.note=a=b", ("model", "options", "note"), "a=b"),
    ],
)
def test_an_override_is_a_dotted_key_and_a_value_as_in_the_file(
    text: str, path: tuple[str, ...], value: object
) -> None:
    found: Any = loads(SMALLEST, [text]).to_dict()
    for part in path:
        found = found[part]
    assert found == value


def test_an_override_may_reach_into_a_list() -> None:
    tables = smallest(devices={"groups": [{"name": "a", "capacity": 0.5}, {"name": "b", "capacity": 1.0}]})
    assert from_dict(tables, ["devices.groups.0.capacity=0.25"]).devices.groups[0].capacity == 0.25
    assert "there are 2 entries" in problems_of(tables, "devices.groups.2.capacity=0.25")[0]


def test_an_override_replaces_what_excludes_it() -> None:
    steps = loads(SMALLEST + "[training]\nlocal_epochs = 3", ["training.local_steps=10"]).training
    assert (steps.local_epochs, steps.local_steps) == (None, 10)
    split = loads(COMPLETE, ["data.split=dirichlet", "data.alpha=0.5"]).data
    assert (split.classes_per_client, split.alpha) == (None, 0.5)
    count = loads(COMPLETE, ["devices.clients_per_round=4"]).devices
    assert (count.participation, count.clients_per_round) == (None, 4)


@pytest.mark.parametrize(
    "given",
    [
        {"split": "classes", "classes_per_client": 3, "unbalance": 0.5},
        {"split": "dirichlet", "alpha": 0.5, "equal_sizes": False},
        {"split": "natural", "groups_per_client": 2, "domains": ["b", "a"]},
    ],
    ids=lambda given: given["split"],
)
def test_another_split_does_not_inherit_what_only_the_files_split_uses(given: dict[str, Any]) -> None:
    tables = smallest(data=given)
    plain = from_dict(smallest()).data
    assert from_dict(tables, ["data.split=iid"]).data == plain
    assert from_dict(tables, [f"data.split={given['split']}"]).data == from_dict(tables).data
    other = from_dict(tables, ["data.split=classes", "data.classes_per_client=5"]).data
    assert (other.split, other.classes_per_client, other.alpha, other.domains) == ("classes", 5, None, ())
    assert problems_of(smallest(data=given | {"split": "iid"}))  # what the file itself says must agree


def test_another_method_does_not_inherit_the_options_of_the_first() -> None:
    assert loads(COMPLETE, ["method.name=heterofl", "method.scaler=true"]).method.options == {"scaler": True}
    assert "orthogonality" in loads(COMPLETE, ["method.name=flanc"]).method.options


@pytest.mark.parametrize("text", ["rounds", "=3", "rounds=", "a b=3", "devices.capacities=[0.5", "name='x"])
def test_an_override_that_is_no_assignment_is_refused(text: str) -> None:
    assert f"override {text!r}" in problems_of(smallest(), text)[0]


# CSV


def test_groups_read_from_csv_become_part_of_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text(
        "\ufeffname, clients, capacity, activation_bytes, bytes_per_second, available\n"
        "board, 12, 0.25, , 1e6, 0.5\n"
        "7, 8, , 64000000, ,\n",
        encoding="utf-8",
    )
    config = from_dict(smallest(devices={"file": "fleet.csv"}), folder=tmp_path)
    board, numbered = config.devices.groups
    assert (board.name, board.clients, board.capacity, board.bytes_per_second) == ("board", 12, 0.25, 1e6)
    assert (numbered.name, numbered.capacity, numbered.available) == ("7", None, None)
    assert numbered.budget is not None
    assert numbered.budget.activation_bytes == 64e6
    (tmp_path / "fleet.csv").unlink()
    assert loads(dumps(config)) == config


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file"),
        ("name,capcity\na,1", "unknown column 'capcity'; did you mean 'capacity'?"),
        ("name,capacity\na,1,2,3", "line 2: has more cells"),
        ("name,capacity\n", "has no rows"),
        ("", "has no rows"),
        ("name,capacity\na,2", "line 2: devices.groups.capacity: given 2, must be above 0"),
        ("name,capacity\na,much", "line 2: devices.groups.capacity: given 'much', must be a number"),
    ],
)
def test_a_bad_csv_is_refused_by_name(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "fleet.csv").write_text(content)
    with pytest.raises(ConfigError) as caught:
        from_dict(smallest(devices={"file": "fleet.csv"}), folder=tmp_path)
    assert words in str(caught.value)


# Schedules


def torch_rates(config: TrainingConfig, rounds: int) -> list[float]:
    """The learning rates of torch's own schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.learning_rate)
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if config.schedule == "cosine":
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds, config.final_learning_rate)
    else:
        marks = [round(mark * rounds) if mark < 1 else int(mark) for mark in config.milestones]
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, marks, config.gamma)
    rates = []
    for _ in range(rounds):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    "keys",
    [
        {"schedule": "cosine"},
        {"schedule": "cosine", "final_learning_rate": 1e-4},
        {"schedule": "step", "milestones": [0.5]},
        {"schedule": "step", "milestones": [0.07, 0.29, 75], "gamma": 0.5},
    ],
)
def test_learning_rates_are_those_of_torchs_schedulers(keys: dict[str, Any]) -> None:
    config = TrainingConfig(learning_rate=0.1, **keys)
    expected = torch_rates(config, 100)
    assert [config.rate(number, 100) for number in range(100)] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_shortened_run_keeps_its_schedule() -> None:
    config = TrainingConfig(learning_rate=1.0, schedule="step", milestones=[0.5])
    assert [config.rate(number, 4) for number in range(4)] == [1.0, 1.0, 0.1, 0.1]
    assert config.rate(99, 200) == 1.0
    assert config.rate(100, 200) == 0.1


def test_a_constant_rate_stays() -> None:
    assert {TrainingConfig(learning_rate=0.3).rate(number, 10) for number in range(10)} == {0.3}


# Writing and comparing

texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
leaves = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    texts,
    st.just("# \x7f\x00\"'\\"),
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(texts.filter(lambda key: key not in ("name", "options")), values, max_size=4), values)
def test_whatever_toml_can_hold_comes_out_as_it_went_in(options: dict[str, Any], value: Any) -> None:
    config = from_dict(smallest(method=options, data={"options": {"value": value}}))
    text = dumps(config)
    again = loads(text)
    assert again == config
    assert again.method.options == config.method.options == options
    assert dumps(again) == text


@pytest.mark.parametrize(
    "tables",
    [
        tomllib.loads(COMPLETE),
        smallest(devices={"distribution": "exponential", "assignment": "order", "clients_per_round": 3}),
        smallest(
            devices={
                "groups": [
                    {
                        "name": "a",
                        "clients": 5,
                        "budget": dict.fromkeys(("macs", "bytes", "parameters"), 1000000.0),
                    },
                    {"name": "b", "capacity": 1, "macs_per_second": 1e9, "available": 0.5},
                ]
            }
        ),
        smallest(training={"local_steps": 5, "clip": 1.0}, engine={"round_timeout": 30, "min_clients": 2}),
    ],
)
def test_the_written_file_is_complete_and_equal(tables: dict[str, Any]) -> None:
    config = from_dict(tables)
    parsed = tomllib.loads(dumps(config))
    assert loads(dumps(config)) == config
    assert set(parsed) == set(ExperimentConfig.model_fields) - {"compare"}  # which has no default
    assert parsed["training"]["weight_decay"] == 1e-4


def test_differences_name_every_changed_key_with_both_values() -> None:
    before = loads(COMPLETE)
    after = loads(COMPLETE, ["rounds=300", "engine.workers=4", "method.orthogonality=1.0", "training.clip=5.0"])
    assert differences(changes(before, after)) == [
        "rounds: 200 -> 300",
        "method.orthogonality: 10.0 -> 1.0",
        "engine.workers: 2 -> 4",
        "training.clip: absent -> 5.0",
    ]
    assert changes(before, after)["rounds"] == (200, 300)
    assert differences(changes(before, loads(dumps(before)))) == []


def test_differences_reach_into_groups() -> None:
    groups = [{"name": "a", "capacity": 0.5}, {"name": "b", "capacity": 1.0}]
    before = from_dict(smallest(devices={"groups": groups}))
    after = from_dict(smallest(devices={"groups": groups}), ["devices.groups.1.capacity=0.75"])
    assert differences(changes(before, after)) == ["devices.groups[1].capacity: 1.0 -> 0.75"]
