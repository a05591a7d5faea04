"""What comes from outside is refused unless it is what was asked for, and what the device can afford."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import small
from anysize import config as configs
from anysize.deploy.affordable import message_cost
from anysize.deploy.device_file import DeviceConfig, Limits
from anysize.deploy.gate import Gate, accepted, refuse_layers
from anysize.deploy.guard import Guard
from anysize.devices.budget import Budget
from anysize.engines.base import Absence
from anysize.engines.inprocess import InProcess
from anysize.errors import ConfigError, TrustError
from anysize.experiment.brief import Brief
from anysize.experiment.signature import Known
from anysize.methods.messages import Client, SubModel, Update
from anysize.runs.experiment import Experiment
from anysize.wire import Json, Tensors, dump, flatten, load, peek
from fuzzing import bounded

METHODS = ("fedavg", "heterofl", "flanc", "splitmix", "prism", "elf", "fjord", "fedhm", "oat")


@cache
def made(method: str, batch_norm: str | None = None) -> Experiment:
    """A small experiment on digits with batch-norm; eLF's with a mask."""
    options: Json = {"name": method}
    if method == "elf":
        options |= {"sparsities": [0.5], "proxy": 0.2, "proxy_epochs": 1}
    model: Json = {"name": "small-cnn", "options": {"channels": [4, 4]}}
    if method == "elf":
        model = {"name": "resnet14", "options": {"channels": [4, 4]}}
    return small.experiment(
        method=options,
        model=model,
        data={"clients": 6, "fraction": 0.1},
        tricks={} if batch_norm is None else {"batch_norm": batch_norm},
        engine={"name": "inprocess"},
    )


def message(experiment: Experiment, task: str = "train", place: int = -1, client: int = 1) -> SubModel:
    """What the server sends to a client."""
    method, context = experiment.method, experiment.context
    state = method.init(context)
    found = method.extract(context, state, Client(client, 0, context.sizes[place], 3, 10, 0, task))
    return replace(found, ticket=replace(found.ticket, job=task, rate=0.05 if task == "train" else None))


@cache
def exchanged(method: str, task: str = "train", batch_norm: str | None = None) -> tuple[Guard, SubModel, Update]:
    """A guard, a message, and the honest answer to it, over the wire."""
    experiment = made(method, batch_norm)
    sent = message(experiment, task)
    engine = InProcess(experiment.context, experiment.method, experiment.shares, {})
    (update,) = engine.perform([sent])
    return Guard.of(experiment), sent, arrived(update)


def arrived(update: Update) -> Update:
    """The update as another machine gets it."""
    return Update.from_json(*load(dump(update.tensors, update.to_json())))


def judged(guard: Guard, sent: SubModel, update: Update, **lies: Any) -> Update | Absence:
    """What the guard makes of an update whose note says something else here and there."""
    return guard(sent, update.tensors, update.to_json() | lies)


def refused(guard: Guard, sent: SubModel, update: Update, **lies: Any) -> str:
    answer = judged(guard, sent, update, **lies)
    assert isinstance(answer, Absence), "the update got through"
    assert answer.client == sent.ticket.client
    return answer.why


# The server's side ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("task", ["train", "calibrate", "evaluate"])
def test_an_honest_answer_gets_through_unchanged(method: str, task: str) -> None:
    guard, sent, update = exchanged(method, task)
    answer = judged(guard, sent, update)
    assert isinstance(answer, Update), answer
    assert dump(answer.tensors, answer.to_json()) == dump(update.tensors, update.to_json())


@pytest.mark.parametrize("batch_norm", ["tracked", "local", "calibrated"])
def test_an_honest_answer_gets_through_whatever_batch_norm_does(batch_norm: str) -> None:
    guard, sent, update = exchanged("heterofl", "train", batch_norm)
    assert isinstance(judged(guard, sent, update), Update)


def test_an_answer_to_every_size_gets_through() -> None:
    experiment = made("flanc")
    guard = Guard.of(experiment)
    engine = InProcess(experiment.context, experiment.method, experiment.shares, {})
    for place in range(len(experiment.context.sizes)):
        sent = message(experiment, place=place)
        (update,) = engine.perform([sent])
        assert isinstance(judged(guard, sent, arrived(update)), Update)


def _first(tensors: Tensors) -> str:
    """The largest tensor, which is no norm layer's."""
    return max(tensors, key=lambda name: tensors[name].numel())


def _changed(update: Update, change: Callable[[torch.Tensor], torch.Tensor]) -> Update:
    name = _first(update.tensors)
    return replace(update, tensors=update.tensors | {name: change(update.tensors[name].clone())})


def _poke(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def poke(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return poke


POISONS: dict[str, tuple[Callable[[Update], Update], str]] = {
    "nan": (lambda u: _changed(u, _poke(math.nan)), "not finite"),
    "infinite": (lambda u: _changed(u, _poke(math.inf)), "not finite"),
    "huge": (lambda u: _changed(u, lambda t: t * 0 + 1e6), "engine.update_norm"),
    "overflowing": (lambda u: _changed(u, lambda t: t * 0 + 3e38), "not finite|engine.update_norm"),
    "shape": (lambda u: _changed(u, lambda t: t.flatten()[:1]), r"of shape \(1,\), expected"),
    "longer": (lambda u: _changed(u, lambda t: torch.cat([t, t])), "of shape .* expected"),
    "flat": (lambda u: _changed(u, lambda t: t.reshape(1, -1, 1, 1, 1)), "of shape .* expected"),
    "double": (lambda u: _changed(u, lambda t: t.double()), "of type float64, expected float32"),
    "half": (lambda u: _changed(u, lambda t: t.half()), "of type float16, expected float32"),
    "integer": (lambda u: _changed(u, lambda t: t.long()), "of type int64, expected float32"),
    "extra": (lambda u: replace(u, tensors=u.tensors | {"back.door": torch.ones(2)}), "'back.door', which it was not"),
    "nothing": (lambda u: replace(u, tensors={}), "sent no weight"),
    "one less": (
        lambda u: replace(u, tensors={n: t for n, t in u.tensors.items() if n != _first(u.tensors)}),
        "sent no weight",
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_update_is_refused(method: str, poison: str) -> None:
    guard, sent, update = exchanged(method)
    spoil, said = POISONS[poison]
    why = refused(guard, sent, spoil(update))
    assert re.search(said, why), why


LIES: dict[str, tuple[Json, str]] = {
    "another client": ({"client": 2}, "client = 2, expected 1"),
    "another round": ({"round": 4}, "round = 4, expected 3"),
    "another size": ({"size": "0.5"}, "size = '0.5', expected '1.0'"),
    "another width": ({"width": 0.25}, "width = 0.25, expected"),
    "another job": ({"job": "evaluate"}, "job = 'evaluate', expected 'train'"),
    "true for one": ({"client": True}, "client = True is not a whole number"),
    "no samples": ({"samples": 0}, "samples = 0, expected a whole number"),
    "fewer than none": ({"samples": -5}, "samples = -5"),
    "too many samples": ({"samples": 10**9}, "samples = 1000000000, expected a whole number from 1 to 1000000"),
    "half a sample": ({"samples": 0.5}, "samples = 0.5"),
    "true samples": ({"samples": True}, "samples = True"),
    "samples in words": ({"samples": "many"}, "samples = 'many'"),
    "no loss": ({"loss": None}, "loss = None"),
    "loss that is none": ({"loss": math.nan}, "loss = nan"),
    "classes unasked": ({"classes": [1] * 10}, "nobody may ask for"),
    "more than asked": ({"weight": 1000.0}, "'weight', which nobody asked for"),
    "an escape": ({"\x1b[31m": 1}, "which nobody asked for"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_ticket_is_refused(lie: str) -> None:
    guard, sent, update = exchanged("flanc")
    change, said = LIES[lie]
    why = refused(guard, sent, update, **change)
    assert said in why
    assert "\x1b" not in why


def test_a_ticket_that_lacks_something_is_refused() -> None:
    guard, sent, update = exchanged("flanc")
    for key in sent.ticket.to_json():
        left = {name: value for name, value in update.to_json().items() if name != key}
        answer = guard(sent, update.tensors, left)
        assert isinstance(answer, Absence)
        assert key in answer.why
    for nothing in (None, [], "ticket", 3):
        answer = guard(sent, update.tensors, nothing)
        assert isinstance(answer, Absence)
        assert "is not a ticket" in answer.why


def test_which_classes_a_client_has_is_checked_where_it_is_asked() -> None:
    guard, sent, update = exchanged("heterofl")
    assert len(update.classes or ()) == 10
    for lie in (None, [1] * 9, [2] * 10, [True] * 10, [0] * 10, "1111111111", [[1]] * 10):
        assert "expected a 0 or 1 for each" in refused(guard, sent, update, classes=lie)


def test_what_should_stay_with_the_client_is_not_believed() -> None:
    guard, sent, update = exchanged("flanc")
    answer = judged(guard, sent, replace(update, keep={"secret": torch.ones(3)}))
    assert isinstance(answer, Update)
    assert answer.keep == {}


@pytest.mark.parametrize(
    "sums",
    [
        None,
        {},
        {"count": 5.0, "correct": 3.0},
        {"count": 5.0, "correct": 3.0, "loss": math.inf},
        {"count": 5.0, "correct": 3.0, "loss": "low"},
        {"count": 0.0, "correct": 0.0, "loss": 0.0},
        {"count": -1.0, "correct": 0.0, "loss": 0.0},
        {"count": 5.0, "correct": 6.0, "loss": 1.0},
        {"count": 5.0, "correct": -1.0, "loss": 1.0},
        {"count": 5.0, "correct": 3.0, "loss": 1.0, "bonus": 1.0},
    ],
)
def test_sums_that_nobody_could_have_counted_are_refused(sums: Any) -> None:
    guard, sent, update = exchanged("flanc", "evaluate")
    assert "sent" in refused(guard, sent, update, sums=sums)


def test_statistics_that_no_data_has_are_refused() -> None:
    guard, sent, update = exchanged("flanc", "calibrate")
    for name, value in (("0.variance", -1.0), ("0.mean", 1e20), ("0.count", -4.0), ("1.variance", 1e35)):
        poisoned = update.tensors | {name: torch.full_like(update.tensors[name], value)}
        assert f"statistics {name}" in refused(guard, sent, replace(update, tensors=poisoned))


def test_tracked_statistics_may_move_far_but_stay_statistics() -> None:
    guard, sent, update = exchanged("heterofl", "train", "tracked")
    (variance, *_) = [name for name in update.tensors if name.endswith("running_var")]
    far = update.tensors | {variance: torch.full_like(update.tensors[variance], 1e9)}
    assert isinstance(judged(guard, sent, replace(update, tensors=far)), Update)
    below = update.tensors | {variance: torch.full_like(update.tensors[variance], -1.0)}
    assert "statistics" in refused(guard, sent, replace(update, tensors=below))


def test_the_norm_that_is_allowed_is_the_experiments() -> None:
    experiment = made("flanc")
    _, sent, update = exchanged("flanc")
    strict = experiment.config.engine.model_copy(update={"update_norm": 1e-6})
    guard = Guard(experiment.context, experiment.method, strict, ["count", "correct", "loss"])
    moved = math.sqrt(
        sum(
            float((update.tensors[name].double() - sent.tensors[name].double()).square().sum())
            for name in update.tensors
            if "running_" not in name and "num_batches" not in name
        )
    )
    assert f"moved by {moved:.3g}" in refused(guard, sent, update)


def test_an_update_that_did_not_train_is_within_every_norm() -> None:
    experiment = made("flanc")
    _, sent, update = exchanged("flanc")
    strict = experiment.config.engine.model_copy(update={"update_norm": 1e-12})
    guard = Guard(experiment.context, experiment.method, strict, ["count", "correct", "loss"])
    assert isinstance(judged(guard, sent, replace(update, tensors=sent.tensors)), Update)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(
        st.sampled_from(["client", "round", "size", "job", "samples", "loss", "classes", "width", "more"]),
        JSON,
        min_size=1,
    ),
    task=st.sampled_from(["train", "evaluate", "calibrate"]),
)
def test_no_ticket_makes_the_guard_stumble_or_believe(changes: Json, task: str) -> None:
    """Whatever a ticket says: an absence, or an update with the ticket that was sent."""
    guard, sent, update = exchanged("flanc", task)
    answer = judged(guard, sent, update, **changes)
    if isinstance(answer, Update):
        assert answer.ticket == sent.ticket
        if task == "train":
            assert type(answer.samples) is int
            assert 0 < answer.samples <= 1_000_000
            assert answer.loss is not None
            assert math.isfinite(answer.loss)
    else:
        assert len(answer.why) < 1000


@settings(max_examples=150, deadline=None)
@given(
    place=st.integers(0, 100),
    shape=st.lists(st.integers(0, 4), max_size=5),
    kind=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]),
    value=st.floats(-(2.0**127), 2.0**127, width=32),
)
def test_what_gets_through_can_be_aggregated(place: int, shape: list[int], kind: torch.dtype, value: float) -> None:
    """A tensor replaced by any other: refused, or the method takes it and its state stays finite."""
    guard, sent, update = exchanged("heterofl")
    experiment = made("heterofl")
    name = sorted(update.tensors)[place % len(update.tensors)]
    answer = judged(guard, sent, replace(update, tensors=update.tensors | {name: torch.full(shape, value).to(kind)}))
    if isinstance(answer, Update):
        state = experiment.method.init(experiment.context)
        after = experiment.method.aggregate(experiment.context, state, iter([answer]))
        assert all(bool(tensor.isfinite().all()) for tensor in after.tensors.values())


# Over the wire --------------------------------------------------------------------------------------


def test_a_header_tells_what_loading_would_give() -> None:
    tensors = {
        "w": torch.zeros(2, 3),
        "n": torch.tensor(4),
        "b": torch.zeros(5, dtype=torch.bfloat16),
        "e": torch.zeros(0),
    }
    blob = dump(tensors, {"round": 1})
    found = peek(blob)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in load(blob)[0].items()
    }
    assert all(tensor.is_meta for tensor in found.values())


def _blob(header: Json, payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xff" * 8,
        (2**60).to_bytes(8, "little") + b"{}",
        _blob({"w": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4 * 10**18]}}),
        _blob({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4]}}, bytes(4)),
        _blob({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, bytes(4)),
        _blob({"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        _blob({"w": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}, bytes(6)),
        _blob({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(5)),
        _blob({"w": [1, 2]}),
        len(b"[" * 100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(blob: bytes) -> None:
    with pytest.raises(TrustError, match="damaged or was not written by anysize"):
        peek(blob)


# The device's side ----------------------------------------------------------------------------------


def gate(experiment: Experiment, **limits: Any) -> Gate:
    return Gate(experiment.context.for_client(), experiment.method, experiment.example, Limits(**limits))


def sent_as(sub_model: SubModel) -> tuple[bytes, Json]:
    return dump(sub_model.tensors, {}), json.loads(json.dumps(sub_model.ticket.to_json()))


def test_a_device_refuses_what_its_memory_cannot_hold() -> None:
    experiment = made("flanc")
    sent = message(experiment)
    needed = message_cost(experiment.context, experiment.method, sent, experiment.example)["memory_bytes"]
    gate(experiment, capacity=1.0, memory_bytes=needed)(*sent_as(sent))
    with pytest.raises(TrustError, match="bytes of memory"):
        gate(experiment, capacity=1.0, memory_bytes=needed - 1)(*sent_as(sent))


def test_a_device_refuses_tensors_that_are_no_part_of_the_network() -> None:
    experiment = made("heterofl")
    sent = message(experiment)
    blob, ticket = sent_as(replace(sent, tensors=sent.tensors | {"more": torch.zeros(10)}))
    with pytest.raises(TrustError, match="does not build the network"):
        gate(experiment, capacity=1.0)(blob, ticket)


def test_a_device_does_not_load_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = made("flanc")
    monkeypatch.setattr("anysize.deploy.gate.load", lambda blob: pytest.fail("it was loaded"))
    with pytest.raises(TrustError):
        gate(experiment, budget=Budget(parameters=1))(*sent_as(message(experiment)))


@pytest.mark.parametrize(
    "change",
    [
        {"job": "echo"},
        {"job": None},
        {"job": ["train"]},
        {"client": -1},
        {"round": "1"},
        {"seed": 0.5},
        {"width": 2.0},
        {"width": None},
        {"rate": math.nan},
        {"rate": -1},
        {"batch_size": 0},
        {"calibration_samples": "all"},
    ],
)
def test_an_order_that_is_none_is_refused(change: Json) -> None:
    experiment = made("flanc")
    blob, ticket = sent_as(message(experiment))
    with pytest.raises(TrustError, match="refused what the server sent"):
        gate(experiment, capacity=1.0)(blob, ticket | change)


# Whose code -----------------------------------------------------------------------------------------

TEXT = 'data.name = "devices"\nmodel = { name = "mlp", input = [4] }\ntask.classes = 2\nmethod.name = "fedavg"\n'


def device(*allow: str) -> DeviceConfig:
    return DeviceConfig(name="cam", server="a:1", data="a:b", capacity=0.5, allow=list(allow))


def test_an_experiment_of_built_in_names_is_accepted() -> None:
    assert accepted(TEXT, device()) == configs.loads(TEXT)


@pytest.mark.parametrize("key", ["model", "method", "task"])
def test_code_runs_only_if_the_devices_own_file_names_it(key: str) -> None:
    config = configs.loads(TEXT, [f"{key}.name=os:system"])
    with pytest.raises(TrustError, match=f"does not allow: .*{key}.name"):
        accepted(configs.dumps(config), device("os:popen", "os.system:x"))
    assert accepted(configs.dumps(config), device("os:system")) == config


def test_an_experiment_may_not_read_files_of_the_device() -> None:
    with pytest.raises(TrustError, match=r"devices\.file"):
        accepted(TEXT + 'devices.file = "/etc/passwd"\n', device())
    with pytest.raises(ConfigError):
        accepted("no = toml = at all", device())


def test_an_experiment_of_a_simulation_is_refused_since_clients_tell_more_there() -> None:
    text = TEXT.replace('data.name = "devices"', 'data = { name = "digits", clients = 5 }')
    for name in ("digits", "os:system"):
        with pytest.raises(TrustError, match=f"data.name = \"'{name}'\", which is for simulations"):
            accepted(text.replace("digits", name), device())


@pytest.mark.parametrize(
    "option", ['checkpoint_path = "own.pth"', 'pretrained_cfg = { url = "https://x" }', 'layers = ["kernels/x"]']
)
def test_options_of_another_packages_network_lead_to_no_file_and_no_address(option: str) -> None:
    text = TEXT.replace('"mlp"', f'"timm:resnet18", options = {{ num = 3, act_layer = "relu", {option} }}')
    with pytest.raises(TrustError, match="may lead to a file or an address"):
        accepted(text, device("timm:resnet18"))
    assert accepted(text.replace(f", {option}", ""), device("timm:resnet18"))


def test_a_network_with_a_layer_that_no_memory_holds_is_refused_before_it_is_made() -> None:
    text = TEXT.replace('"mlp"', '"mlp", options = { hidden = [1_000_000, 1_000_000] }')
    found = Known(own().signature, own().sizes)
    huge = Brief(configs.loads(text), found).experiment()
    with bounded(), pytest.raises(TrustError, match=r"a tensor of 4e\+12 bytes, and 2e\+09 bytes of memory are free"):
        refuse_layers(huge, 2e9)
    usual = Brief(configs.loads(TEXT), found).experiment()
    refuse_layers(usual, 256 * 128 * 4)
    with pytest.raises(TrustError, match=r"a tensor of 1\.31e"):
        refuse_layers(usual, 256 * 128 * 4 - 1)


# What leaves a device -------------------------------------------------------------------------------


def own(*share: str, **tables: Any) -> Experiment:
    """The small experiment as a fleet has it: each device has the data that the partition would give it."""
    config = configs.from_dict(
        {
            "data": {"name": "devices", "validation": 0.2},
            "model": {"name": "mlp", "input": [1, 8, 8], "options": {"hidden": [16]}},
            "task": {"classes": 10},
            "method": {"name": "fedavg"},
            "devices": {"capacities": [0.5, 1.0], "share": list(share)},
            **tables,
        }
    )
    return Experiment.from_config(config)


def answer(experiment: Experiment, task: str) -> Update:
    sent = message(experiment, task)
    engine = InProcess(experiment.context, experiment.method, small.experiment().shares, {})
    (update,) = engine.perform([sent])
    checked = judged(Guard.of(experiment), sent, arrived(update))
    assert isinstance(checked, Update), checked
    return checked


def test_counts_and_classes_leave_a_device_only_if_the_experiment_says_so() -> None:
    told = answer(own(), "train")
    assert told.samples is None
    assert told.classes is None
    assert (answer(own("samples"), "train").samples or 0) > 1
    heterofl = own("labels", method={"name": "heterofl"})
    assert sum(answer(heterofl, "train").classes or ()) > 1
    assert answer(heterofl, "train").samples is None


def test_without_counts_a_device_tells_means() -> None:
    silent, open_ = answer(own(), "evaluate"), answer(own("samples"), "evaluate")
    assert silent.samples is None
    assert silent.sums is not None
    assert open_.sums is not None
    assert silent.sums["count"] == 1.0
    assert open_.sums["count"] == open_.samples
    assert open_.sums["count"] > 1
    task = own().task
    assert task.metrics(silent.sums) == pytest.approx(task.metrics(open_.sums))


def test_without_counts_statistics_do_not_tell_them_either() -> None:
    def statistics(*share: str) -> Update:
        model = {"name": "small-cnn", "input": [1, 8, 8], "options": {"channels": [4, 4]}}
        return answer(own(*share, model=model, tricks={"batch_norm": "calibrated"}), "calibrate")

    silent, open_ = statistics(), statistics("samples")
    samples = float(open_.tensors["0.count"]) / float(silent.tensors["0.count"])
    assert samples == round(samples) > 1
    assert torch.equal(silent.tensors["0.mean"], open_.tensors["0.mean"])


def test_a_count_that_nobody_may_ask_for_is_refused() -> None:
    experiment = own()
    sent = message(experiment)
    engine = InProcess(experiment.context, experiment.method, small.experiment().shares, {})
    (update,) = engine.perform([sent])
    assert "which nobody may ask for" in refused(Guard.of(experiment), sent, arrived(update), samples=7)


def test_without_counts_every_device_counts_alike() -> None:
    """FedAvg's new weights are the plain mean of the updates, whatever the amount of data."""
    experiment = own()
    context, method = experiment.context, experiment.method
    engine = InProcess(context, method, small.experiment().shares, {})
    sent = [message(experiment, client=client) for client in range(3)]
    updates = list(engine.perform(sent))
    after = method.aggregate(context, method.init(context), iter(updates))
    found = {name.rpartition("/")[2]: tensor for name, tensor in flatten(after)[0].items()}
    for name in updates[0].tensors:
        expected = torch.stack([update.tensors[name] for update in updates]).double().mean(0)
        torch.testing.assert_close(found[name.partition(".")[2]].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_plan_lists_what_leaves_a_device() -> None:
    from anysize.experiment.plan import plan

    silent = plan(own())["leaves_the_device"]
    assert not any("number of samples" in line for line in silent)
    assert any("means of the metrics" in line for line in silent)
    assert any("mean training loss" in line for line in silent)
    assert any("its name" in line for line in silent)
    told = plan(own("samples", "labels", method={"name": "heterofl"}))["leaves_the_device"]
    assert "its number of samples" in told
    assert any("which classes it holds" in line for line in told)
    assert any("sums and counts of the metrics" in line for line in told)
