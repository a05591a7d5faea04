"""FedAvg of one network on ours, Flower's simulation, pfl-research and a plain loop, each in processes of its own.

    python benchmarks/peers.py            # about five minutes; writes benchmarks/peers.json
    python benchmarks/peers.py --table    # prints it for the docs

Fashion-MNIST on 100 clients, 10 in a round, one epoch of batches of 32 on the full `small-cnn`. The four take turns,
several times; what else the machine does can only add time, so the shortest counts. Ours has two workers with a thread
each, as it chooses on two cores, and starts as `anysize run` does: the workers first, which load beside this process.
Flower's has two as well, on Ray, with a plain loop in each. The others are one process with PyTorch's own threads.
`pip install pfl "flwr[simulation]"` is needed.
"""

# ruff: noqa: E402 - our workers start before PyTorch is loaded

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from anysize.engines.start import quick_start
from anysize.engines.workers.pool import WorkerPool

POOL: WorkerPool | None = None
if sys.argv[1:] == ["--side", "anysize"]:  # before PyTorch is loaded
    quick_start()
    POOL = WorkerPool(2)

import torch
from torch import nn

from anysize.client.process import hold_memory
from anysize.config.files import from_dict
from anysize.engines.workers.engine import Processes
from anysize.runs.experiment import Experiment
from anysize.runs.runner import environment
from anysize.server.round import run_round

OUT = Path(__file__).with_suffix(".json")
ROUNDS, TIMES, RATE, BATCH, CLIENTS = 3, 2, 0.05, 32, 10
SIDES = ("anysize", "flower", "pfl", "plain")
_WATCH_SECONDS = 0.05
_MARK = "ANYSIZE_PEER"
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray lets all other processes go before its own, which the other sides do not
}


def job() -> Experiment:
    """FedAvg on the full network."""
    tables = {
        "data": {"name": "fashion-mnist", "clients": 100, "split": "iid"},
        "model": {"name": "small-cnn"},
        "devices": {"capacities": [1.0], "participation": 0.1},
        "method": {"name": "fedavg"},
        "training": {"batch_size": BATCH, "learning_rate": RATE},
    }
    return Experiment.from_config(from_dict(tables))


def participants(made: Experiment, number: int) -> list[int]:
    """The clients of a round."""
    return list(made.fleet.participants(number))


def timed(one: Callable[[int], object]) -> None:
    """Prints the seconds of every round; the first warms up."""
    seconds = []
    for number in range(1, ROUNDS + 2):
        began = time.perf_counter()
        one(number)
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


def anysize() -> None:
    """Ours."""
    from anysize.methods.messages import Client

    made = job()
    hold_memory()
    torch.set_num_threads(1)
    state: Any = made.method.init(made.context)
    assert POOL is not None
    with POOL, Processes(made, {}, pool=POOL) as engine:

        def one(number: int) -> None:
            nonlocal state
            ids = participants(made, number)
            clients = [Client(c, i, made.sizes[0], number, made.shares.samples(c), 0) for i, c in enumerate(ids)]
            state = run_round(made.context, made.method, state, clients, engine, RATE)[0]

        timed(one)


def network(made: Experiment) -> nn.Module:
    """The network that all train, with the same first weights."""
    return made.method.customize(made.context, made.method.init(made.context), made.sizes[0])


def samples(made: Experiment, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's inputs between 0 and 1, and its labels."""
    part = made.shares.share(client).train
    x, y = part.batch(torch.arange(len(part)))
    return x.float() / 255 if not x.is_floating_point() else x, y


def trained(made: Experiment, server: nn.Module, client: int) -> dict[str, torch.Tensor]:
    """What a client's training makes of the network, in a loop that one writes without a framework."""
    net = deepcopy(server).train()
    x, y = samples(made, client)
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=1e-4)
    for places in torch.randperm(len(x)).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[places]), y[places]).backward()
        optimizer.step()
    return net.state_dict()


def average(server: nn.Module, states: list[dict[str, torch.Tensor]]) -> None:
    """Gives the server the mean of the clients' tensors."""
    mean = {name: torch.stack([own[name] for own in states]).float().mean(0) for name in states[0]}
    server.load_state_dict({name: tensor.to(states[0][name].dtype) for name, tensor in mean.items()})


def plain() -> None:
    """What one writes without a framework."""
    made = job()
    server = network(made)
    timed(lambda number: average(server, [trained(made, server, client) for client in participants(made, number)]))


@cache
def known() -> tuple[Experiment, nn.Module]:
    """The job and its network as a client's process on Flower knows them, made once in each."""
    made = job()
    return made, network(made)


def answered(message: Any, context: Any) -> Any:
    """A client on Flower: it trains the network that came, and sends it back."""
    from flwr.app import ArrayRecord, Message, RecordDict

    made, net = known()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    state = trained(made, net, int(message.content["config"]["client"]))
    return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)


def flower() -> None:
    """Flower's simulation, as its users write it: a ClientApp, and a ServerApp that sends, waits and averages."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(answered)

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        made, server = known()
        while len(nodes := sorted(grid.get_node_ids())) < 100:
            time.sleep(0.01)

        def one(number: int) -> None:
            arrays = ArrayRecord(server.state_dict())
            answers = grid.send_and_receive(
                [
                    Message(
                        RecordDict({"arrays": arrays, "config": ConfigRecord({"client": client})}),
                        dst_node_id=nodes[client],
                        message_type=MessageType.TRAIN,
                    )
                    for client in participants(made, number)
                ]
            )
            average(server, [dict(answer.content["arrays"].to_torch_state_dict()) for answer in answers])

        timed(one)

    resources = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, 100, backend_config=resources)


class Classifier(nn.Module):
    """A network as pfl wants it: with its loss and metrics."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        self.train(not is_eval)
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {}


def pfl() -> None:
    """pfl-research: its simulated backend and its FederatedAveraging."""
    os.environ["PFL_PYTORCH_DEVICE"] = "cpu"
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    made, seconds = job(), [time.perf_counter()]

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def on_train_begin(self, *, model: Any) -> Any:
            seconds[0] = time.perf_counter()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            seconds.append(time.perf_counter())
            return False, Metrics()

    def of_user(user: str) -> Any:
        return Dataset(raw_data=list(samples(made, int(user))), user_id=user)

    module = Classifier(network(made))
    users = FederatedDataset(of_user, get_user_sampler("random", [str(client) for client in range(100)]))
    model = PyTorchModel(
        module,
        lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=1e-4),
        torch.optim.SGD(module.parameters(), 1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ROUNDS + 1,
            evaluation_frequency=10**6,
            train_cohort_size=CLIENTS,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=500),
        callbacks=[Clock()],
    )
    print(json.dumps([after - before for before, after in pairwise(seconds)]))


def measured(side: str) -> dict[str, float]:
    """Seconds of a round and of all else, and the most memory of a side's processes together."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--side", side]
    mark = f"{side}-{time.time_ns()}"
    settings = os.environ | _QUIET | {_MARK: mark}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings)
    most = 0
    while process.poll() is None:
        most = max(most, resident_bytes(mark))
        time.sleep(_WATCH_SECONDS)
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    rounds = json.loads(next(line for line in reversed(lines) if line.startswith("[")))
    total = time.perf_counter() - began
    return {
        "round_seconds": statistics.median(rounds[1:]),
        "rest_seconds": total - sum(rounds),
        "memory_mb": most / 1e6,
    }


def resident_bytes(mark: str) -> int:
    """The memory of all processes with a mark in their environment, each with its share of what they have in common."""
    total, wanted = 0, f"{_MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes():
                lines = (path / "smaps_rollup").read_text().splitlines()
                total += int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) * 1024
        except (OSError, StopIteration):
            continue
    return total


def table(found: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = ["| | a round | start and end | memory |", "| --- | ---: | ---: | ---: |"]
    for side in SIDES:
        own = found[side]
        about = f"{own['round_seconds']:.2f} s | {own['rest_seconds']:.1f} s | {own['memory_mb']:.0f} MB"
        lines.append(f"| {NAMES[side]} | {about} |")
    return "\n".join(lines)


NAMES = {
    "anysize": "anysize, two workers",
    "flower": "Flower's simulation 1.41.0, two workers",
    "pfl": "pfl-research 0.6.0",
    "plain": "a plain FedAvg loop",
}


def main() -> None:
    """Measures all sides in turns and writes them down."""
    seen: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(TIMES):
        for side, runs in seen.items():
            runs.append(measured(side))
            print(side, runs[-1], flush=True)
    least = {side: {key: min(run[key] for run in runs) for key in runs[0]} for side, runs in seen.items()}
    spread = {
        side: {key: max(run[key] for run in runs) / min(run[key] for run in runs) - 1 for key in runs[0]}
        for side, runs in seen.items()
    }
    found = {"environment": environment(), **least, "spread": spread}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    elif "--side" in sys.argv:
        import peers  # Flower's processes know what they run by its module

        peers.POOL = POOL
        {"anysize": peers.anysize, "flower": peers.flower, "pfl": peers.pfl, "plain": peers.plain}[sys.argv[-1]]()
    else:
        main()
