"""Devices that sit out because no size fits their budget, or none that is wide enough; budgets that change."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import small
from anysize import config as configs
from anysize.config.devices import DevicesConfig
from anysize.errors import CheckpointError, ConfigError
from anysize.experiment.plan import plan
from anysize.experiment.setup import limits_activations
from anysize.methods import Client
from anysize.report import write
from anysize.report.record import read
from anysize.runs.experiment import Experiment
from anysize.runs.runner import run
from anysize.wire import flatten
from test_elf import DENSE, ELF, made

TINY = {"name": "tiny", "clients": 2, "budget": {"parameters": 50}}  # 64 inputs alone need more
BOARD = {"name": "board", "clients": 2, "budget": {"parameters": 700}}
HUB = {"name": "hub", "clients": 2, "budget": {"parameters": 10_000}}


def groups(*kinds: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"capacities": None, "groups": list(kinds), **more}


def skipping(*kinds: dict[str, Any], **changes: Any) -> Experiment:
    devices = groups(*kinds, **{"infeasible": "skip", "assignment": "order", **changes.pop("devices", {})})
    return small.experiment(
        **{"method": {"name": "heterofl"}, "devices": devices, "rounds": 2, "engine": {"name": "inprocess"}} | changes
    )


def parameters(width: float) -> int:
    """The parameters of the small network at a width, counted by hand: 64 inputs, layers of 16 and 8, ten classes."""
    first, second = math.floor(16 * width + 0.5), math.floor(8 * width + 0.5)
    return 64 * first + first + first * second + second + 10 * second + 10


def test_a_group_that_nothing_fits_ends_the_experiment_unless_it_may_sit_out() -> None:
    with pytest.raises(ConfigError, match="group 'tiny' can train no size; the smallest needs parameters = "):
        _ = skipping(TINY, BOARD, HUB, devices={"infeasible": "error"}).sizes
    experiment = skipping(TINY, BOARD, HUB)
    assert [size.label for size in experiment.sizes] == ["board", "hub"]
    assert {experiment.fleet.group_of(client, 1).name for client in (0, 1)} == {"tiny"}
    assert [experiment.fleet.participants(number) for number in (1, 2)] == [[2, 3, 4, 5]] * 2


def test_if_every_group_would_sit_out_it_stays_an_error() -> None:
    with pytest.raises(ConfigError, match=r"(?s)group 'tiny' can train no size.*group 'less' can train no size"):
        _ = skipping({**TINY, "clients": 3}, {**TINY, "clients": 3, "name": "less"}).sizes


def test_those_who_are_drawn_beside_a_group_that_sits_out_stay_drawn() -> None:
    """Oracle: the same fleet with a budget that everybody can afford; who was drawn there and can, is drawn here."""
    some = {"clients_per_round": 3}
    fleet = skipping(TINY, BOARD, HUB, devices=some).fleet
    all_can = skipping({**TINY, "budget": {"parameters": 600}}, BOARD, HUB, devices=some).fleet
    for number in range(1, 20):
        chosen, before = set(fleet.participants(number)), set(all_can.participants(number))
        assert before - {0, 1} <= chosen <= {2, 3, 4, 5}
        assert len(chosen) == 3


def test_with_a_count_for_each_group_the_others_choices_are_the_same() -> None:
    each = {"clients_per_round": [1, 1, 1]}
    fleet = skipping(TINY, BOARD, HUB, devices=each).fleet
    all_can = skipping({**TINY, "budget": {"parameters": 600}}, BOARD, HUB, devices=each).fleet
    for number in range(1, 20):
        assert fleet.participants(number) == [c for c in all_can.participants(number) if c > 1]


def test_a_client_that_draws_a_group_without_a_size_sits_out_that_round() -> None:
    kinds = [{key: value for key, value in kind.items() if key != "clients"} for kind in (TINY, BOARD)]
    fleet = skipping(*kinds, devices={"redraw": "round", "assignment": "random"}).fleet
    for number in range(1, 10):
        able = [client for client in range(6) if fleet.group_of(client, number).name == "board"]
        assert fleet.participants(number) == able
    assert {fleet.group_of(0, number).name for number in range(1, 10)} == {"tiny", "board"}
    with pytest.raises(ConfigError, match=r"devices\.cover: needs infeasible"):
        small.config(devices={"redraw": "round", "cover": True, "infeasible": "skip"})


def test_plan_events_and_report_say_who_sits_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(skipping(TINY, BOARD, HUB))
    by_name = {group["name"]: group for group in found["groups"]}
    assert (by_name["tiny"]["size"], by_name["tiny"]["parameters"]) == (None, None)
    assert by_name["tiny"]["sits_out"].startswith("can train no size; the smallest needs parameters = ")
    assert (by_name["hub"]["sits_out"], by_name["hub"]["parameters"]) == (None, parameters(1.0))
    assert any("'tiny' sits out" in notice for notice in found["notices"])
    devices = groups(TINY, BOARD, HUB, infeasible="skip")
    file = small.file(tmp_path, method={"name": "heterofl"}, devices=devices)
    code, printed, _ = small.call(monkeypatch, capsys, "plan", file)
    assert code == 0
    assert [line.split() for line in printed.splitlines() if line.strip().startswith("tiny")] == [
        ["tiny", "2", "sits", "out"]
    ]

    done = run(skipping(TINY, BOARD, HUB, evaluation={"on": ["test", "clients"]}), out=tmp_path / "run")
    events = [json.loads(line) for line in (done.directory / "events.jsonl").read_text().splitlines()]
    tiny = next(group for group in events[0]["groups"] if group["name"] == "tiny")
    assert tiny["size"] is None
    assert "parameters = " in tiny["sits_out"]
    rounds = [event for event in events if event["event"] == "round"]
    assert [sorted(entry["client"] for entry in event["clients"]) for event in rounds] == [[2, 3, 4, 5]] * 2
    assert all(set(event["client_metrics"]) == {"board", "hub"} for event in rounds)
    record = read(done.directory)
    assert any("'tiny' sits out" in notice for notice in record.start.notices)
    assert "sits out" in write(done.directory).read_text()


def test_a_depth_that_a_method_cannot_train_is_an_error_whoever_may_sit_out() -> None:
    deep = {"name": "deep", "clients": 4, "depth": 9}
    with pytest.raises(ConfigError, match="'deep' has depth = 9, which heterofl cannot train"):
        _ = skipping(TINY, deep).sizes


def test_with_a_minimum_width_of_one_only_devices_that_can_train_the_whole_network_take_part() -> None:
    quarters = {"capacities": [0.25, 0.5, 1.0], "assignment": "order", "minimum_width": 1.0}
    with pytest.raises(ConfigError, match=r"group '0.25' can train width 0.25; devices.minimum_width is 1\n.*'0.5'"):
        _ = small.experiment(devices=quarters).sizes
    strong = small.experiment(devices=quarters | {"infeasible": "skip"}, method={"name": "fedavg"})
    assert [size.label for size in strong.sizes] == ["1.0"]
    assert strong.fleet.participants(1) == [4, 5]
    everybody = small.experiment(devices=quarters | {"minimum_width": 0.0}, method={"name": "fedavg"})
    assert labels(strong) == labels(everybody), "the same partition"


def labels(experiment: Experiment) -> list[list[int]]:
    return [experiment.shares.share(client).train.labels().tolist() for client in range(6)]


def test_a_minimum_width_limits_what_a_budget_may_choose() -> None:
    experiment = skipping(TINY, BOARD, HUB, devices={"minimum_width": 0.75})
    assert [size.label for size in experiment.sizes] == ["hub"]
    needed = f"the smallest needs parameters = {parameters(0.75):,}"
    assert experiment.solved.idle["board"] == f"can train no size; {needed}"


def test_elf_lets_a_group_sit_out_too() -> None:
    kinds = [{"name": "tiny", "budget": {"macs": 1}}, {"name": "low", "budget": {"macs": 7_500}}]
    experiment = made(ELF(**DENSE), {"groups": kinds, "infeasible": "skip", "assignment": "order"})
    assert [(size.label, size.depth) for size in experiment.sizes] == [("low", 1)]
    assert experiment.fleet.participants(1) == [3, 4, 5]


def test_the_default_is_an_error() -> None:
    assert DevicesConfig().infeasible == "error"
    assert DevicesConfig().minimum_width == 0.0


# Budgets that change from round to round


PHONE = {"name": "phone", "clients": 3, "budget": {"parameters": 700}}
LAPTOP = {"name": "laptop", "clients": 3, "budget": {"parameters": 10_000}}
TRACE = "round,group,client,parameters\n2,phone,,400\n4,phone,,700\n3,,0,10000\n3,laptop,,1000\n"


def traced(folder: Path, content: str | bytes, *kinds: dict[str, Any], **changes: Any) -> Experiment:
    """The small experiment with a file of budgets."""
    file = folder / "budgets.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    more = {"assignment": "order", "budgets": str(file), **changes.pop("devices", {})}
    return small.experiment(
        **{
            "method": {"name": "heterofl"},
            "devices": groups(*(kinds or (PHONE, LAPTOP)), **more),
            "rounds": 5,
            "engine": {"name": "inprocess"},
        }
        | changes
    )


def widest(limit: float) -> float | None:
    """The widest of sixteen widths with at most so many parameters."""
    return max((place / 16 for place in range(1, 17) if parameters(place / 16) <= limit), default=None)


def expected(client: int, number: int) -> float | None:
    """What `TRACE` gives each client, read by hand."""
    if client == 0 and number >= 3:
        return widest(10_000)
    if client < 3:
        return widest(400 if 2 <= number < 4 else 700)
    return widest(1000 if number >= 3 else 10_000)


def widths(experiment: Experiment, number: int) -> dict[int, float]:
    fleet, sizes = experiment.fleet, experiment.size_of_group
    return {c: sizes[fleet.group_of(c, number).key].width for c in fleet.participants(number)}


def test_in_every_round_a_client_has_the_best_size_that_fits_the_budget_of_that_round(tmp_path: Path) -> None:
    experiment = traced(tmp_path, TRACE)
    for number in range(1, 8):
        assert widths(experiment, number) == {client: expected(client, number) for client in range(6)}
    assert [size.label for size in experiment.sizes] == sorted({repr(widest(x)) for x in (400, 700, 1000, 10_000)})


def test_a_run_sends_each_client_the_size_of_the_round(tmp_path: Path) -> None:
    done = run(traced(tmp_path, TRACE, evaluation={"on": ["test", "clients"]}), out=tmp_path / "run")
    for event in events(done.directory, "round"):
        told = {entry["client"]: float(entry["size"]) for entry in event["clients"]}
        assert told == {client: expected(client, event["round"]) for client in range(6)}
        assert {entry["group"] for entry in event["clients"]} == {"phone", "laptop"}
        assert set(event["client_metrics"]) == {"phone", "laptop"}
    phone, laptop = events(done.directory, "start")[0]["groups"]
    assert (phone["size"], phone["sizes"]) == (None, [repr(widest(x)) for x in (400, 700, 10_000)])
    assert laptop["sizes"] == [repr(widest(x)) for x in (1000, 10_000)]
    assert "phone" in write(done.directory).read_text()


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def test_a_resumed_run_gives_the_same_bits(tmp_path: Path) -> None:
    late = {"evaluate_every": 9}
    plain = run(traced(tmp_path, TRACE, rounds=3, **late), out=tmp_path / "plain")
    run(traced(tmp_path, TRACE, rounds=1, **late), out=tmp_path / "resumed")
    resumed = run(traced(tmp_path, TRACE, rounds=3, **late), out=tmp_path / "resumed", resume=True)
    assert same(plain.state, resumed.state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["processes", "flower"])
def test_all_engines_give_the_same_bits(tmp_path: Path, name: str) -> None:
    plain = run(traced(tmp_path, TRACE), out=tmp_path / "plain")
    other = run(traced(tmp_path, TRACE, engine={"name": name, "workers": 2}), out=tmp_path / name)
    assert same(plain.state, other.state)


def same(one: Any, other: Any) -> bool:
    first, second = flatten(one)[0], flatten(other)[0]
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_with_another_trace_is_not_resumed(tmp_path: Path) -> None:
    run(traced(tmp_path, TRACE, rounds=1), out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"devices\.budgets\[0\]\.parameters: \[400\.0, 700\.0\] -> \[500\.0, 7"):
        run(traced(tmp_path, TRACE.replace("400", "500")), out=tmp_path / "run", resume=True)
    (tmp_path / "budgets.csv").unlink()  # the run directory needs no file
    assert configs.load(tmp_path / "run" / "config.toml").devices.budgets[1].client == 0


def test_the_complete_file_holds_the_trace(tmp_path: Path) -> None:
    content = "round,group,macs,bytes\n1,phone,inf,4e3\n7,phone,900,\n"
    config = traced(tmp_path, content).config
    [trace] = config.devices.budgets
    assert (trace.rounds, trace.macs, trace.bytes) == ((1, 7), (math.inf, 900.0), (4000.0, math.inf))
    assert configs.loads(configs.dumps(config)) == config


def test_a_budget_that_nothing_fits_names_the_round_and_what_would_fit(tmp_path: Path) -> None:
    content = "round,group,client,parameters\n2,phone,,50\n3,phone,,700\n5,phone,,60\n3,,4,9\n"
    least = f"can train no size; the smallest needs parameters = {parameters(1 / 16)}"
    with pytest.raises(ConfigError) as caught:
        _ = traced(tmp_path, content).sizes
    assert str(caught.value).splitlines() == [
        f"devices: group 'phone' in round 2, from round 5 {least}",
        f"devices: client 4 of group 'laptop' from round 3 {least}",
    ]


def test_who_nothing_fits_sits_out_that_round_only(tmp_path: Path) -> None:
    content = "round,group,client,parameters\n2,phone,,50\n3,phone,,700\n4,,5,50\n"
    experiment = traced(tmp_path, content, devices={"infeasible": "skip"})
    taking_part = [experiment.fleet.participants(number) for number in range(1, 5)]
    assert taking_part == [[0, 1, 2, 3, 4, 5], [3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]
    found = plan(experiment)
    assert [group["sits_out"] for group in found["groups"]] == [None, None]
    assert sum("group 'phone' in round 2 sits out" in notice for notice in found["notices"]) == 1
    assert sum("client 5 of group 'laptop' from round 4 sits out" in notice for notice in found["notices"]) == 1


def test_a_round_in_which_everybody_sits_out_changes_nothing(tmp_path: Path) -> None:
    content = "round,group,parameters\n2,phone,50\n2,laptop,50\n3,phone,700\n3,laptop,700\n"
    done = run(traced(tmp_path, content, devices={"infeasible": "skip"}, rounds=3), out=tmp_path / "run")
    rounds = events(done.directory, "round")
    assert [len(event["clients"]) for event in rounds] == [6, 0, 6]
    assert rounds[0]["accuracy"] == rounds[1]["accuracy"]


def test_the_plan_says_the_range_of_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(traced(tmp_path, TRACE))
    phone, laptop = found["groups"]
    assert [size["width"] for size in phone["sizes"]] == [widest(400), widest(700), widest(10_000)]
    assert [size["parameters"] for size in laptop["sizes"]] == [parameters(w) for w in (widest(1000) or 0, 1.0)]
    devices = groups(PHONE, LAPTOP, assignment="order", budgets=str(tmp_path / "budgets.csv"))
    file = small.file(tmp_path, method={"name": "heterofl"}, devices=devices)
    code, printed, _ = small.call(monkeypatch, capsys, "plan", file)
    assert code == 0
    assert f"{widest(400):g} to 1" in next(line for line in printed.splitlines() if "phone" in line)


@pytest.mark.parametrize("name", ["flanc", "splitmix", "prism", "fjord"])
def test_budgets_are_kept_in_every_round_whatever_the_method(tmp_path: Path, name: str) -> None:
    """Oracle: the numbers in the message that a client gets in a round, and the limit that the file has for it."""
    plain = small.experiment(method={"name": name})
    half, full = (plain.cost(size).parameters for size in plain.sizes)
    limits = {1: full, 2: 1.1 * half, 3: full, 9: full}
    rows = "".join(f"{number},phone,{limit}\n" for number, limit in limits.items())
    kinds = [PHONE, {**LAPTOP, "budget": {"parameters": 2 * full}}]
    experiment = traced(tmp_path, f"round,group,parameters\n{rows}", *kinds, method={"name": name})
    method, context = experiment.method, experiment.context
    state, widths = method.init(context), []
    for number, limit in limits.items():
        size = experiment.size_of_group[experiment.fleet.group_of(0, number).key]
        message = method.extract(context, state, Client(0, 0, size, number, 8, 0))
        numbers = sum(p.numel() for p in method.build(context, message).parameters() if p.requires_grad)
        assert numbers <= limit
        widths.append(size.width)
    assert widths[1] < widths[0] == widths[2] == widths[3]


def test_elf_looks_up_the_budget_of_every_round(tmp_path: Path) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text("round,group,macs\n2,low,7500\n3,low,1000000\n")
    kinds = [{"name": "low", "budget": {"macs": 1e6}}, {"name": "high", "budget": {"macs": 1e6}}]
    devices = {"groups": kinds, "assignment": "order", "budgets": str(file)}
    experiment = made(ELF(**DENSE), devices)
    key = [experiment.fleet.group_of(0, number).key for number in (1, 2, 3)]
    assert [experiment.size_of_group[k].depth for k in key] == [3, 1, 3]
    assert [size.label for size in experiment.sizes] == ["1.0 depth 1", "1.0 depth 3", "high"]


def test_a_client_that_draws_its_group_has_the_budget_of_that_group_and_round(tmp_path: Path) -> None:
    kinds = [{key: value for key, value in kind.items() if key != "clients"} for kind in (PHONE, LAPTOP)]
    content = "round,group,client,parameters\n3,phone,,400\n4,,0,1000\n"
    experiment = traced(tmp_path, content, *kinds, devices={"redraw": "round", "assignment": "random"})
    limits = {"phone": (700, 400), "laptop": (10_000, 10_000)}
    for number in range(1, 9):
        names = [experiment.fleet.group_of(client, number).name for client in range(6)]
        wanted = {c: widest(limits[name][number >= 3]) for c, name in enumerate(names)}
        assert widths(experiment, number) == wanted | ({0: widest(1000)} if number >= 4 else {})


def test_a_group_whose_clients_all_have_their_own_budgets_needs_none_that_fits(tmp_path: Path) -> None:
    rows = "".join(f"1,,{client},700\n" for client in range(3))
    experiment = traced(tmp_path, f"round,group,client,parameters\n{rows}", {**PHONE, "budget": {"macs": 1}}, LAPTOP)
    assert widths(experiment, 1) == {c: widest(700 if c < 3 else 10_000) for c in range(6)}


def test_a_group_with_the_name_of_another_size_is_refused(tmp_path: Path) -> None:
    width = repr(widest(400))
    with pytest.raises(ConfigError, match=f"different sizes of one label, '{width}'; give a group another name"):
        _ = traced(tmp_path, "round,group,parameters\n2,phone,400\n", PHONE, {**LAPTOP, "name": width}).sizes


def test_a_size_that_nobody_can_run_in_a_round_of_evaluation_normalises_by_its_batch(tmp_path: Path) -> None:
    """The finished run has statistics for what its devices can run in the last round, and works at every size."""
    full = small.experiment(model=CNN, method={"name": "heterofl"})
    costs = {size.label: full.cost(size).parameters for size in full.sizes}
    content = f"round,group,parameters\n2,phone,{costs['0.5']}\n2,laptop,{costs['0.5']}\n"
    kinds = [{**kind, "budget": {"parameters": costs["1.0"]}} for kind in (PHONE, LAPTOP)]
    done = run(traced(tmp_path, content, *kinds, model=CNN, rounds=2), out=tmp_path / "run")
    assert [size.label for size in done.sizes] == ["0.5", "1.0"]
    assert set(events(done.directory, "round")[-1]["accuracy"]) == {"0.5", "1.0"}
    for size in done.sizes:
        assert done.customize(size.label)(torch.rand(4, 1, 8, 8)).shape == (4, 10)


CNN = {"name": "small-cnn", "options": {"channels": [8, 16]}}


@pytest.mark.parametrize(
    "content, words",
    [
        ("round,group,mac\n1,phone,9", "line 1: unknown column 'mac'; did you mean 'macs'?"),
        ("round,group,parameters,parameters\n1,phone,9,9", "line 1: column 'parameters' occurs 2 times"),
        ("group,parameters\nphone,9", "line 1: column 'round' is missing"),
        ("round,group,parameters\n1,phone,-9", "line 2: parameters: given '-9', must be a number above 0"),
        ("round,group,parameters\n1,phone,0", "line 2: parameters: given '0', must be a number above 0"),
        ("round,group,parameters\n1,phone,many", "line 2: parameters: given 'many', must be a number above 0"),
        ("round,group,parameters\n1,phone,nan", "line 2: parameters: given 'nan', must be a number above 0"),
        ("round,group,parameters\n1,phone,", "line 2: must limit at least one of parameters"),
        ("round,group,parameters\n1,phone,inf", "line 2: must limit at least one of parameters"),
        ("round,group,parameters\n1,,9", "line 2: must name either a group or a client"),
        ("round,group,client,parameters\n1,phone,2,9", "line 2: must name either a group or a client"),
        ("round,group,parameters\n1,phone,9\n1,phon,9", "line 3: unknown group 'phon'; did you mean 'phone'?"),
        ("round,client,parameters\n1,0,900\n1,17,900", "line 3: client 17 is not among the 6 clients, 0 to 5"),
        ("round,client,parameters\n1,-1,9", "line 2: client: given '-1', must be an integer, 0 or more"),
        ("round,client,parameters\n1,one,9", "line 2: client: given 'one', must be an integer, 0 or more"),
        ("round,group,parameters\n0,phone,9", "line 2: round: given '0', must be an integer, 1 or more"),
        ("round,group,parameters\n1.5,phone,9", "line 2: round: given '1.5', must be an integer, 1 or more"),
        ("round,group,parameters\n,phone,9", "line 2: round: given '', must be an integer, 1 or more"),
        ("round,group,parameters\n1,phone,9\n\n1,phone,8", "line 4: gives another budget for round 1, which line 2"),
        ("round,group,parameters\n1,phone,9,9", "line 2: has more cells than there are columns"),
        ('round,group,parameters\n1,"phone,9', "cannot be read as CSV"),
        ("round,group,parameters\n", "has no rows"),
        ("", "has no rows"),
        (b"round,group,parameters\n1,phone,9\n2,ph\xf6ne,9\n", "line 3: cannot be read as CSV: not UTF-8 text"),
    ],
)
def test_a_bad_file_of_budgets_is_refused_with_its_line(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = traced(tmp_path, content).sizes
    assert f"devices.budgets: {tmp_path / 'budgets.csv'}" in str(caught.value)
    assert words in str(caught.value)


def test_budgets_change_only_where_there_are_budgets_and_no_real_devices(tmp_path: Path) -> None:
    file = tmp_path / "budgets.csv"
    file.write_text("round,group,macs\n1,phone,9\n")
    with pytest.raises(ConfigError, match=r"devices\.budgets: needs devices\.groups"):
        small.config(devices={"budgets": str(file)})
    fixed = {"name": "phone", "clients": 6, "capacity": 0.5}
    with pytest.raises(ConfigError, match="group 'phone' has a capacity, and only budgets change"):
        small.config(devices=groups(fixed, budgets=str(file)))
    tables = small.fleet_tables("heterofl") | {"devices": {"groups": [PHONE], "budgets": str(file)}}
    with pytest.raises(ConfigError, match="every device tells its budget itself"):
        configs.from_dict(tables)
    file.write_text("round,client,macs\n1,5,9\n")
    kinds = [PHONE, {"name": "hub", "clients": 3, "capacity": 1.0}]
    mixed = small.experiment(devices=groups(*kinds, assignment="order", budgets=str(file)))
    with pytest.raises(ConfigError, match=r"line 2: client 5 can be in group 'hub', which has a capacity"):
        _ = mixed.sizes
    with pytest.raises(ConfigError, match=r"no such|No such file"):
        small.config(devices=groups(PHONE, LAPTOP, budgets=str(tmp_path / "none.csv")))


def test_traces_can_be_written_as_tables(tmp_path: Path) -> None:
    """The same experiment as from the file."""
    tables = [
        {"group": "phone", "rounds": [2, 4], "parameters": [400, 700]},
        {"client": 0, "rounds": [3], "parameters": [10_000]},
        {"group": "laptop", "rounds": [3], "parameters": [1000]},
    ]
    devices = groups(PHONE, LAPTOP, assignment="order", budgets=tables)
    written = small.config(method={"name": "heterofl"}, devices=devices, rounds=5, engine={"name": "inprocess"})
    assert written == traced(tmp_path, TRACE).config
    for wrong, words in (
        ({"rounds": [1], "macs": [1.0]}, "must name either a group or a client"),
        ({"group": "phone", "rounds": [2, 1], "macs": [1.0, 1.0]}, "must ascend"),
        ({"group": "phone", "rounds": [1, 2], "macs": [1.0]}, "a limit for each of the 2 rounds; macs differs"),
        ({"group": "phone", "rounds": [1], "macs": [-1.0]}, "must be above 0"),
        ({"group": "phone", "rounds": [2, 3], "parameters": [1.0, math.inf]}, "round 3 has none"),
    ):
        with pytest.raises(ConfigError, match=words):
            small.config(devices=groups(PHONE, LAPTOP, budgets=[wrong]))
    with pytest.raises(ConfigError, match=r"devices\.budgets\[3\]: names what devices\.budgets\[0\] names"):
        small.config(devices=groups(PHONE, LAPTOP, budgets=[*tables, tables[0]]))


def test_a_budget_of_activations_that_comes_later_counts_too(tmp_path: Path) -> None:
    later = "round,group,activation_bytes\n3,phone,100000\n"
    assert limits_activations(traced(tmp_path, later).config.devices)
    assert not limits_activations(traced(tmp_path, TRACE).config.devices)


def test_many_budgets_are_solved_quickly(tmp_path: Path) -> None:
    """A budget for each of fifty rounds and each client; only sixteen sizes are ever counted."""
    rows = [f"{r},,{c},{400 + 13 * r + 7 * c}" for r in range(1, 51) for c in range(6)]
    experiment = traced(tmp_path, "\n".join(["round,group,client,parameters", *rows]))
    assert len(experiment.size_of_group) > 200
    assert widths(experiment, 50) == {c: widest(400 + 13 * 50 + 7 * c) for c in range(6)}
    assert len(experiment.sizes) < 16
