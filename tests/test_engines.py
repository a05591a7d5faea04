"""Worker processes give the bits of one process, survive their workers' deaths, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anysize.client.networks import built
from anysize.config.files import from_dict
from anysize.engines.folder import Folder, remove_abandoned
from anysize.engines.inprocess import InProcess
from anysize.engines.workers import shared_memory as shared
from anysize.engines.workers.engine import Processes, obstacle
from anysize.errors import AnysizeError, DataError, MethodError
from anysize.methods.messages import Client
from anysize.runs.experiment import Experiment
from anysize.server.calibration import calibrated
from anysize.server.judging import on_test
from anysize.server.round import run_round
from anysize.wire import dump, flatten

METHODS = ("fedavg", "heterofl", "flanc")


def experiment(method: str = "heterofl", **tables: Any) -> Experiment:
    base = {
        "data": {"name": "digits", "clients": 12, "fraction": 0.5},
        "model": {"name": "small-cnn", "options": {"channels": [8, 16]}},
        "method": {"name": method},
        "training": {"batch_size": 8},
    }
    return Experiment.from_config(from_dict(base | tables))


def clients(made: Experiment, count: int = 6) -> list[Client]:
    size = {c: made.size_of_group[made.fleet.group_of(c, 1).name] for c in range(count)}
    return [Client(c, c, size[c], 1, made.shares.samples(c), 0) for c in range(count)]


def bits(state: Any) -> bytes:
    return dump(*flatten(state))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "method, tricks",
    [
        pytest.param("fedavg", {}, marks=pytest.mark.slow),
        pytest.param("heterofl", {"batch_norm": "local"}, marks=pytest.mark.slow),
        ("flanc", {"classwise_head": True, "proximal": 0.1}),
    ],
)
def test_worker_processes_end_in_the_same_bits_as_one_process(method: str, tricks: dict[str, Any]) -> None:
    made = experiment(method, tricks=tricks)
    state = made.method.init(made.context)
    kept_here: dict[int, Any] = {}
    kept_there: dict[int, Any] = {}
    here: Any = state
    there: Any = state
    with Processes(made, kept_there, workers=2) as processes:
        inside = InProcess(made.context, made.method, made.shares, kept_here)
        for _ in range(2):
            here, tally = run_round(made.context, made.method, here, clients(made), inside, 0.05)
            kept_here |= tally.kept
            there, tally = run_round(made.context, made.method, there, clients(made), processes, 0.05)
            kept_there |= tally.kept
    assert bits(here) == bits(there)
    assert bits(here) != bits(state)
    assert kept_here.keys() == kept_there.keys()
    for client, tensors in kept_here.items():
        assert dump(tensors, {}) == dump(kept_there[client], {})


def test_a_worker_that_is_killed_is_replaced_and_its_client_is_trained_again() -> None:
    made = experiment()
    state = made.method.init(made.context)
    expected, _ = run_round(
        made.context, made.method, state, clients(made), InProcess(made.context, made.method, made.shares, {}), 0.05
    )
    with Processes(made, {}, workers=2) as engine:
        victims = {worker.process.pid for worker in engine._workers}
        killed = False

        def kill_one(_: Any) -> None:
            nonlocal killed
            if not killed:
                killed = True
                os.kill(engine._workers[0].process.pid, signal.SIGKILL)

        found, tally = run_round(made.context, made.method, state, clients(made), engine, 0.05, kill_one)
        assert killed
        assert {worker.process.pid for worker in engine._workers} != victims
    assert bits(found) == bits(expected)
    assert len(tally.clients) == 6


def test_calibration_statistics_are_the_same_on_both_engines() -> None:
    made = experiment("heterofl", training={"batch_size": 16})
    state = made.method.init(made.context)
    inside = InProcess(made.context, made.method, made.shares, {})
    expected = calibrated(made.context, made.method, state, inside, made.fleet, made.size_of_group, 1, 5)
    with Processes(made, {}, workers=2) as engine:
        found = calibrated(made.context, made.method, state, engine, made.fleet, made.size_of_group, 1, 5)
    assert expected.keys() == found.keys()
    for label, statistics in expected.items():
        assert dump(statistics.tensors(), {}) == dump(found[label].tensors(), {})


@pytest.mark.parametrize(
    "method, tricks", [pytest.param("heterofl", {"batch_norm": "batch"}, marks=pytest.mark.slow), ("flanc", {})]
)
def test_workers_measure_the_same_metrics_as_one_process(method: str, tricks: dict[str, Any]) -> None:
    made = experiment(method, tricks=tricks, evaluation={"batch_size": 7})
    state = made.method.init(made.context)
    assert made.data is not None
    test = made.data.test
    assert test is not None
    expected = on_test(made.context, made.method, state, test, {}, 7)
    with Processes(made, {}, workers=2) as engine:
        assert engine._test is test
        found = on_test(made.context, made.method, state, test, {}, 7, engine=engine)
        os.kill(engine._workers[0].process.pid, signal.SIGKILL)
        again = on_test(made.context, made.method, state, test, {}, 7, engine=engine)
        assert not list(engine._home.glob("state-*"))
    assert found == again == expected
    assert list(found) == [size.label for size in made.sizes]


def test_an_engine_goes_on_after_any_number_of_evaluations() -> None:
    made = experiment("flanc")
    state = made.method.init(made.context)
    assert made.data is not None
    test = made.data.test
    assert test is not None
    with Processes(made, {}, workers=1) as engine:
        for _ in range(5):
            on_test(made.context, made.method, state, test, {}, 500, engine=engine)
        assert len(engine._free) == 2
        _, tally = run_round(made.context, made.method, state, clients(made, 2), engine, 0.05)
    assert len(tally.clients) == 2


def test_an_engine_that_was_left_in_the_middle_says_so() -> None:
    made = experiment()
    state = made.method.init(made.context)
    with Processes(made, {}, workers=1) as engine:
        engine._free.clear()  # every slot belongs to a pass that nobody reads on
        with pytest.raises(RuntimeError, match="not finished"):
            run_round(made.context, made.method, state, clients(made, 1), engine, 0.05)


def test_workers_measure_with_the_statistics_that_were_calibrated() -> None:
    made = experiment("heterofl", model={"name": "small-cnn", "options": {"channels": [4, 8]}})
    state = made.method.init(made.context)
    assert made.data is not None
    test = made.data.test
    assert test is not None
    with Processes(made, {}, workers=2) as engine:
        statistics = calibrated(made.context, made.method, state, engine, made.fleet, made.size_of_group, 1, 3)
        found = on_test(made.context, made.method, state, test, statistics, 500, engine=engine)
    assert found == on_test(made.context, made.method, state, test, statistics, 500)
    assert found != on_test(made.context, made.method, state, test, {}, 500)


def test_what_killed_servers_left_in_shared_memory_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    used = Folder(tmp_path)
    killed = tmp_path / "anysize-killed"
    killed.mkdir()
    (killed / "in-use").touch()
    foreign = tmp_path / "anysize-of-another-kind"
    foreign.mkdir()
    remove_abandoned(tmp_path)
    assert used.path.is_dir()
    assert foreign.is_dir()
    assert not killed.exists()
    used.remove()
    assert not used.path.exists()


def test_an_error_on_a_worker_is_the_error_that_one_process_raises() -> None:
    made = experiment(training={"learning_rate": 1e30})
    state = made.method.init(made.context)
    with Processes(made, {}, workers=2) as engine, pytest.raises(MethodError, match="diverged"):
        run_round(made.context, made.method, state, clients(made), engine, 1e30)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    made = experiment()
    made.context  # noqa: B018 - the server knows its model; the workers will not find it
    made.config = from_dict(made.config.to_dict() | {"method": {"name": "nowhere:Method"}})
    with pytest.raises(AnysizeError, match="nowhere"):
        Processes(made, {}, workers=1)


def test_closing_ends_the_workers_and_frees_the_memory() -> None:
    made = experiment()
    engine = Processes(made, {}, workers=2)
    home = engine._home
    pids = [worker.process.pid for worker in engine._workers]
    assert home.is_dir()
    engine.close()
    assert not home.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_consumer_that_stops_early_leaves_an_engine_that_still_closes() -> None:
    made = experiment()
    state = made.method.init(made.context)
    engine = Processes(made, {}, workers=2)
    from dataclasses import replace

    messages = (made.method.extract(made.context, state, client) for client in clients(made))
    ready = (replace(m, ticket=replace(m.ticket, rate=0.05)) for m in messages)
    stream = engine.perform(ready)
    next(stream)
    stream.close()
    began = time.monotonic()
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(timeout=20)
    assert not closing.is_alive()
    assert time.monotonic() - began < 20


def test_live_objects_that_no_name_leads_to_cannot_go_to_workers() -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    made = Experiment(data="digits", clients=4, model=net, method="fedavg")
    assert "model" in str(obstacle(made))
    assert obstacle(experiment()) is None


def test_tensors_in_shared_memory_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.arange(7, dtype=torch.int64),
        "c": torch.tensor(2.5, dtype=torch.float64),
        "d": torch.zeros(0, 4),
        "e": torch.tensor([True, False]),
    }
    memory = shared.create(tmp_path / "m", shared.space(tensors))
    layout, end = shared.put(tensors, memory)
    assert end == shared.space(tensors)
    found = shared.get(layout, shared.attach(tmp_path / "m"))
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_client_without_a_held_out_share_is_named() -> None:
    made = experiment()
    from anysize.client.work import evaluate

    state = made.method.init(made.context)
    message = made.method.extract(made.context, state, clients(made)[0])
    with pytest.raises(DataError, match="client 0 has no holdout"):
        evaluate(made.context, made.method, message, made.shares.share(0), {})


def test_a_worker_that_died_while_idle_is_replaced() -> None:
    made = experiment()
    state = made.method.init(made.context)
    expected, _ = run_round(
        made.context, made.method, state, clients(made), InProcess(made.context, made.method, made.shares, {}), 0.05
    )
    with Processes(made, {}, workers=1) as engine:
        engine._workers[0].process.kill()
        engine._workers[0].process.wait()
        found, _ = run_round(made.context, made.method, state, clients(made), engine, 0.05)
    assert bits(found) == bits(expected)


def test_messages_that_name_their_tensors_in_another_order_fill_the_same_network() -> None:
    """Else a process would keep a network for every message."""
    made = experiment("heterofl")
    message = made.method.extract(made.context, made.method.init(made.context), clients(made)[0])
    turned = replace(message, tensors=dict(reversed(message.tensors.items())))
    assert built(made.context, made.method, message) is built(made.context, made.method, turned)


def test_a_network_that_changes_its_constants_gives_the_same_bits_in_any_order() -> None:
    made = experiment("fedavg")
    state = made.method.init(made.context)
    inside = InProcess(made.context, made.method, made.shares, {})
    alone, _ = run_round(made.context, made.method, state, clients(made)[1:2], inside, 0.05)
    for module in [entry[1] for entry in made.context.built.values()]:
        for child in module.modules():
            for name in child._non_persistent_buffers_set:
                child._buffers[name] = child._buffers[name] + 1.0  # what a forward pass with a memory would do
    again, _ = run_round(made.context, made.method, state, clients(made)[1:2], inside, 0.05)
    assert bits(alone) == bits(again)
