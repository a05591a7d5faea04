"""Secure sums over a fleet: messages as they travel, with devices that leave, lie, or refuse."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anysize import config as configs
from anysize.data import DeviceShares
from anysize.deploy import device_file, own_data
from anysize.deploy.guard import Guard
from anysize.engines.inprocess import InProcess
from anysize.errors import TrustError
from anysize.methods.messages import Client
from anysize.methods.sums import words_of
from anysize.runs.experiment import Experiment
from anysize.runs.runner import run
from anysize.server.round import run_round
from anysize.wire import dump, flatten, load

pytest.importorskip("flwr", reason="Flower is an extra")
client = importlib.import_module("anysize.deploy.client")
engine = importlib.import_module("anysize.deploy.engine")
gate = importlib.import_module("anysize.deploy.gate")
layout = importlib.import_module("anysize.deploy.folder")
link = importlib.import_module("anysize.deploy.link")
membership = importlib.import_module("anysize.deploy.membership")
messages = importlib.import_module("anysize.engines.flower_records")
roster = importlib.import_module("anysize.deploy.roster")

NAMES = {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5, "e": 1.0, "f": 1.0, "g": 1.0}

EXPERIMENT = """
name = "secure"
rounds = 2
evaluate_every = 2
[data]
name = "devices"
test = "digits"
[model]
name = "mlp"
options = { hidden = [16] }
[devices]
capacities = [0.5, 1.0]
share = ["samples"]
[method]
name = "heterofl"
[tricks]
classwise_head = false
weighting = "samples"
[training]
learning_rate = 0.05
[aggregation]
secure_threshold = 3
[engine]
name = "flower"
min_clients = 1
round_timeout = 0.3
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def laid_out(folder: Path, text: str = EXPERIMENT) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "own.toml"
    file.write_text(text)
    home = folder / "fleet"
    wanted = {name: {"capacity": capacity} for name, capacity in NAMES.items()}
    layout.lay_out(home, layout.planned(file, wanted, [], 18000, None))
    return home


Fault = Callable[[str, Any, Any], Any]
"""Takes the step, what was asked and what the device answers; gives what arrives, or None for nothing."""


class Wire:
    """Devices in this process in place of a network."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.there = {100 + place: name for place, name in enumerate(sorted(NAMES))}
        self.faults: dict[str, Fault] = {}
        self.seen: list[tuple[str, str, Any]] = []
        self.desks: dict[str, Any] = {}
        self._replies: dict[str, Any] = {}
        self._count = 0

    def nodes(self) -> list[Any]:
        return [link.Node(number, name, "now") for number, name in self.there.items()]

    def send(self, node: int, kind: str, content: Any, round: int, seconds: float | None) -> str | None:
        name, step = self.there[node], step_of(kind, content)
        answer = self.desk(name).reply(kind, content)
        fault = self.faults.get(name)
        answer = answer if fault is None else fault(step, content, answer)
        self._count += 1
        if answer is not None:
            self.seen.append((name, step, answer))
            self._replies[str(self._count)] = link.Reply(answer)
        return str(self._count)

    def desk(self, name: str) -> Any:
        """A device's process; a new one if it has none."""
        if name not in self.desks:
            self.desks[name] = client.Service(self.home / "devices" / name / "device.toml")
        return self.desks[name]

    def replies(self, sent: Collection[str]) -> dict[str, Any]:
        return {number: self._replies.pop(number) for number in sent if number in self._replies}


def step_of(kind: str, content: Any) -> str:
    """ "query", "train", or the step of a sum."""
    return str(messages.note_in(content).get("sum", {}).get("step", kind))


def bench(folder: Path, *changes: str) -> tuple[Experiment, Any, Wire]:
    """An experiment, its engine and the wire, with all devices there."""
    home = laid_out(folder)
    wire = Wire(home)
    experiment = Experiment.from_config(configs.load(home / "experiment.toml", changes))
    ours = engine.Devices(experiment, wire, roster.Roster.at(folder, layout.device_keys(home)), Guard.of(experiment))
    ours.fleet(1, experiment.fleet)
    return experiment, ours, wire


def inside(experiment: Experiment, home: Path) -> InProcess:
    """The same devices' data in this process, without messages and masks."""
    files = [home / "devices" / name / "device.toml" for name in sorted(NAMES)]

    def share(place: int) -> Any:
        return own_data.own_share(device_file.load(files[place]), experiment.config, experiment.signature)

    return InProcess(experiment.context, experiment.method, DeviceShares(share, len(files)), {})


def everybody(experiment: Experiment, round: int = 1, *without: int) -> list[Client]:
    """The clients in the order of aggregation: the large ones first."""
    sizes = {size.label: size for size in experiment.context.sizes}
    names = sorted(NAMES)
    order = [place for place in (4, 5, 6, 0, 1, 2, 3) if place not in without]
    return [Client(c, i, sizes[str(NAMES[names[c]])], round, 1, 0) for i, c in enumerate(order)]


def bits(state: Any) -> bytes:
    return dump(*flatten(state))


def gone_from(step: str) -> Fault:
    """A device that is switched off before it answers a step."""
    off = False

    def fault(now: str, content: Any, answer: Any) -> Any:
        nonlocal off
        off = off or now == step
        return None if off else answer

    return fault


def test_a_fleet_that_sums_securely_ends_in_the_bits_of_one_process_that_sums(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    wire = Wire(home)

    def on_wire(experiment: Experiment, kept: Any) -> Any:
        book = roster.Roster.at(tmp_path / "there", layout.device_keys(home))
        return engine.Devices(experiment, wire, book, Guard.of(experiment))

    experiment = Experiment.from_config(configs.load(home / "experiment.toml"))
    there = run(experiment, out=tmp_path / "there", engine=on_wire)
    assert [r.get("missing") for r in there.history] == [None, None]
    assert {(c["samples"], c["loss"]) for r in there.history for c in r["clients"]} == {(None, None)}
    steps = [step for name, step, _ in wire.seen if name == "a"]
    assert steps == ["query", *2 * ["train", "shares", "words", "unmask"]]

    context, method, here = experiment.context, experiment.method, inside(experiment, home)
    open_to_all = replace(context, aggregation=replace_threshold(context.aggregation))
    state = plain = method.init(context)
    for round in (1, 2):
        state, tally = run_round(context, method, state, everybody(experiment, round), here, 0.05)
        plain, open_tally = run_round(open_to_all, method, plain, everybody(experiment, round), here, 0.05)
        assert there.history[round - 1]["train_loss"] == tally.train_loss
        assert tally.train_loss == pytest.approx(open_tally.train_loss, rel=1e-4)
    assert bits(there.state) == bits(state)
    assert bits(plain) != bits(state)
    for name, tensor in flatten(plain)[0].items():
        assert torch.allclose(tensor, flatten(state)[0][name], rtol=1e-5, atol=2e-6)


def replace_threshold(aggregation: Any) -> Any:
    """The same rule in the open."""
    return aggregation.model_copy(update={"secure_threshold": None})


@pytest.mark.parametrize("step", ["train", "shares", "words", "unmask"])
def test_a_device_that_leaves_at_any_step_costs_no_more_than_its_own_update(tmp_path: Path, step: str) -> None:
    experiment, ours, wire = bench(tmp_path)
    context, method = experiment.context, experiment.method
    state = method.init(context)
    wire.faults = {"b": gone_from(step)}
    after, tally = run_round(context, method, state, everybody(experiment), ours, 0.05)
    left = everybody(experiment) if step == "unmask" else everybody(experiment, 1, 1)
    expected, _ = run_round(context, method, state, left, inside(experiment, wire.home), 0.05)
    assert bits(after) == bits(expected)
    late = [{"client": 1, "why": "too late: no answer within 0.3 s"}]
    assert tally.missing == ([] if step == "unmask" else late)
    assert len(tally.clients) == len(left)


@pytest.mark.parametrize("step", ["train", "unmask"])
def test_a_size_with_too_few_devices_left_learns_nothing_and_the_others_do(tmp_path: Path, step: str) -> None:
    """Three devices are large, and a sum needs three of them."""
    experiment, ours, wire = bench(tmp_path)
    context, method = experiment.context, experiment.method
    state = method.init(context)
    wire.faults = {"g": gone_from(step)}
    after, tally = run_round(context, method, state, everybody(experiment), ours, 0.05)
    expected, _ = run_round(
        context, method, state, everybody(experiment, 1, 4, 5, 6), inside(experiment, wire.home), 0.05
    )
    assert bits(after) == bits(expected)
    assert sorted(entry["client"] for entry in tally.missing) == [4, 5, 6]
    why = {entry["client"]: entry["why"] for entry in tally.missing}
    assert why[4] == "2 devices of its size were left, and a sum that hides each needs 3"
    assert not tally.void


def test_nothing_that_the_server_sees_tells_what_a_single_device_learned(tmp_path: Path) -> None:
    experiment, ours, wire = bench(tmp_path)
    context, method = experiment.context, experiment.method
    state = method.init(context)
    wire.seen.clear()
    run_round(context, method, state, everybody(experiment), ours, 0.05)
    told = {step: set(messages.note_in(answer)) for _, step, answer in wire.seen}
    assert told == {
        "train": {"keys", "device"},
        "shares": {"shares", "device"},
        "words": {"device"},
        "unmask": {"shares", "device"},
    }
    seen = {name: load(messages.blobs_in(answer)[0])[0]["words"] for name, step, answer in wire.seen if step == "words"}
    assert all(not messages.blobs_in(answer) for _, step, answer in wire.seen if step != "words")
    sent = {m.ticket.client: m for m in (method.extract(context, state, c) for c in everybody(experiment))}
    sent = {c: replace(m, ticket=replace(m.ticket, rate=0.05)) for c, m in sent.items()}
    plain = {u.ticket.client: u for u in inside(experiment, wire.home).perform(sent.values())}
    for place, name in enumerate(sorted(NAMES)):
        own = torch.from_numpy(words_of(plain[place], sent[place], context.tricks).view("int64"))
        assert own.shape == seen[name].shape
        assert not bool((own == seen[name]).any())
        small = own.abs() < 2**40  # what the device adds is small; masked words are not
        assert bool(small.all())
        assert float((seen[name].abs() < 2**40).float().mean()) < 0.01


def test_a_device_refuses_a_server_that_asks_for_more_than_a_sum(tmp_path: Path) -> None:
    experiment, ours, wire = bench(tmp_path)
    context, method = experiment.context, experiment.method
    state = method.init(context)
    kept: list[tuple[str, Any]] = []
    wire.faults = {"a": lambda step, content, answer: kept.append((step, content)) or answer}
    run_round(context, method, state, everybody(experiment), ours, 0.05)
    device = wire.desks["a"]

    def again(kind: str, content: Any) -> str:
        return str(messages.note_in(device.reply(kind, content))["failure"])

    asked = dict(kept)
    assert "refused round 1: what it learned in round 1 was summed already" in again("train", asked["train"])
    assert "a sum that it has no part in" in again("train", asked["unmask"])

    def with_ticket(**changes: Any) -> Any:
        note = messages.note_in(asked["train"])
        note["tickets"] = [note["tickets"][0] | changes]
        return messages.with_note(note, messages.record(messages.blobs_in(asked["train"])))

    assert 'refused to "evaluate"' in again("evaluate", with_ticket(job="evaluate"))

    # The next round: everything in order, but for what each case asks.
    def until(step: str, round: int) -> None:
        device.reply("train", with_ticket(round=round))
        if step == "shares":
            return
        raise AssertionError(step)

    def asks(step: str, round: int, told: Any) -> str:
        note = messages.note_in(asked["train"]) | {"sum": membership.asked(step, round, told)}
        return again("train", messages.with_note(note, messages.record([])))

    until("shares", 2)
    assert 'asks for "words", and the next step of this sum is "shares"' in asks("words", 2, {})
    assert "no part in" in asks("shares", 2, {})  # after a mistake the sum is over
    until("shares", 3)
    assert "no step of the sum of round 3" in asks("shares", 2, {})
    until("shares", 3)
    assert "a sum over 0 devices was asked for; this one takes part in 3" in asks("shares", 3, {})
    until("shares", 3)
    assert "expected two keys" in asks("shares", 3, {"0": "abc"})


@pytest.mark.parametrize(("asked", "why"), [(None, "wants to see single updates"), (3, "wants sums over 3 devices")])
def test_a_device_takes_part_only_in_sums_as_large_as_its_file_asks(
    tmp_path: Path, asked: int | None, why: str
) -> None:
    config = configs.loads(EXPERIMENT)
    config = config.model_copy(
        update={"aggregation": config.aggregation.model_copy(update={"secure_threshold": asked})}
    )
    device = device_file.loads(
        'name = "cam"\nserver = "localhost:1"\ndata = "shop:load"\ncapacity = 0.5\nsecure_threshold = 4'
    )
    with pytest.raises(TrustError, match=f"{why}; this device's file allows sums over at least 4"):
        gate.accepted(configs.dumps(config), device)
    assert gate.accepted(configs.dumps(config), device.model_copy(update={"secure_threshold": asked}))


def test_a_fleet_that_is_laid_out_for_sums_refuses_a_server_that_takes_the_line_out(tmp_path: Path) -> None:
    home = laid_out(tmp_path)
    device = device_file.load(home / "devices" / "a" / "device.toml")
    with pytest.raises(TrustError, match="wants to see single updates; this device's file allows sums over at least 3"):
        gate.accepted(EXPERIMENT.replace("secure_threshold = 3", ""), device)
    layout.extend(home, {"late": {"capacity": 0.5}}, None)
    assert device_file.load(home / "devices" / "late" / "device.toml").secure_threshold == 3
    other = laid_out(tmp_path / "other", EXPERIMENT.replace("secure_threshold = 3", ""))
    assert device_file.load(other / "devices" / "a" / "device.toml").secure_threshold is None


def changed(step: str, change: Callable[[Any], Any]) -> Fault:
    """A device that lies in a step."""
    return lambda now, content, answer: change(answer) if now == step else answer


def words(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    def lie(answer: Any) -> Any:
        own = load(messages.blobs_in(answer)[0])[0]["words"]
        return messages.with_note(messages.note_in(answer), messages.record([dump({"words": change(own)}, {})]))

    return lie


def note(**more: Any) -> Callable[[Any], Any]:
    return lambda answer: messages.with_note(
        messages.note_in(answer) | more, messages.record(messages.blobs_in(answer))
    )


@pytest.mark.parametrize(
    ("step", "change", "why"),
    [
        ("train", note(keys=["no", 3]), "expected two keys"),
        ("shares", note(shares={"0": 1}), "expected a text for each member"),
        ("shares", note(shares={}), "sent no shares for others"),
        ("words", words(lambda own: own[:-1]), "words; others sent"),
        ("words", words(lambda own: own.float()), "sent no words"),
    ],
)
def test_an_answer_that_is_none_costs_its_sender_alone(tmp_path: Path, step: str, change: Any, why: str) -> None:
    experiment, ours, wire = bench(tmp_path)
    context, method = experiment.context, experiment.method
    state = method.init(context)
    wire.faults = {"d": changed(step, change)}
    after, tally = run_round(context, method, state, everybody(experiment), ours, 0.05)
    expected, _ = run_round(context, method, state, everybody(experiment, 1, 3), inside(experiment, wire.home), 0.05)
    assert [entry["client"] for entry in tally.missing] == [3]
    assert why in tally.missing[0]["why"]
    assert bits(after) == bits(expected)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda own: own + 2**40, "did not add what it should"),
        (
            lambda own: torch.cat([own[:2], own[2:] + 2**45]),
            "the mean of its size is refused: sent parameters that moved",
        ),
    ],
)
def test_a_liar_can_void_the_sum_of_its_size_but_not_push_the_mean_out_of_bounds(
    tmp_path: Path, lie: Any, why: str
) -> None:
    experiment, ours, wire = bench(tmp_path)
    context, method = experiment.context, experiment.method
    state = method.init(context)
    wire.faults = {"d": changed("words", words(lie))}
    after, tally = run_round(context, method, state, everybody(experiment), ours, 0.05)
    expected, _ = run_round(
        context, method, state, everybody(experiment, 1, 0, 1, 2, 3), inside(experiment, wire.home), 0.05
    )
    assert sorted(entry["client"] for entry in tally.missing) == [0, 1, 2, 3]
    assert all(why in entry["why"] for entry in tally.missing)
    assert bits(after) == bits(expected)
