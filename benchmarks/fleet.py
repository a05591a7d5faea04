"""What a round costs on a fleet, on loopback: against the number of devices, against the payload, and at rest.

Every figure is measured on this machine with the real commands: one SuperLink with TLS and keys, and a worker for
each device. `python benchmarks/fleet.py` writes benchmarks/fleet.json; `--table` prints it for the docs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from anysize.deploy import folder as layout
from anysize.deploy.control import Address
from anysize.runs.runner import environment
from loopback import Loopback, processes_of

OUT = Path(__file__).with_name("fleet.json")
DEVICES = 6
COUNTS = (2, 4, 6)
HIDDEN = {"0.1 MB": 350, "10 MB": 35000}
ROUNDS = 10

EXPERIMENT = """
name = "cost"
rounds = {rounds}
evaluate_every = 1000
[data]
name = "devices"
[model]
name = "mlp"
input = [1, 8, 8]
options = {{ hidden = [{hidden}] }}
[task]
classes = 10
[devices]
capacities = [1.0]
clients_per_round = {count}
[method]
name = "fedavg"
[training]
local_steps = 1
batch_size = 16
[evaluation]
on = ["clients"]
clients = 1
[engine]
name = "flower"
min_clients = {count}
"""


def experiment(count: int, hidden: int, rounds: int = ROUNDS) -> str:
    """An experiment of rounds that hardly train: what remains is the cost of messages."""
    return EXPERIMENT.format(count=count, hidden=hidden, rounds=rounds)


def measured(fleet: Loopback, count: int, hidden: int) -> dict[str, Any]:
    """One run: the median seconds of its rounds after the first, and the bytes of a device's messages."""
    (fleet.home / layout.EXPERIMENT).write_text(experiment(count, hidden))
    fleet.run("--overwrite")
    fleet.finished()
    rounds = fleet.rounds("cost")[1:-1]  # the first loads, the last is judged
    print(count, hidden, [event["seconds"] for event in rounds], file=sys.stderr, flush=True)
    return {
        "devices": count,
        "bytes_down": rounds[0]["bytes_down"] // count,
        "bytes_up": rounds[0]["bytes_up"] // count,
        "round_seconds": statistics.median(event["seconds"] for event in rounds),
        "seconds": [event["seconds"] for event in rounds],
        "rounds": len(rounds),
    }


def polls_per_second(home: Path, address: Address, seconds: float = 8.0, callers: int = 4) -> float:
    """How often devices can ask the SuperLink whether there is something for them, if they do nothing else."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    counts: list[int] = []

    def poll(folder: Path) -> None:
        key: Any = load_ssh_private_key((folder / layout.KEY).read_bytes(), None)
        proof = NodeAuthHttpInterceptor(key, key.public_key())
        version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
        assert address.authority is not None
        with FleetHttpClient.from_server_address(
            address.place, False, str(address.authority), interceptors=[version, proof]
        ) as client:
            public = public_key_to_bytes(key.public_key())
            node = client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30)).node_id
            deadline, count = time.monotonic() + seconds, 0
            while time.monotonic() < deadline:
                client.PullMessages(PullMessagesRequest(node=Node(node_id=node)))
                count += 1
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
            counts.append(count)

    folders = sorted((home / layout.DEVICES).iterdir())[:callers]
    threads = [threading.Thread(target=poll, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def memory_bytes(home: Path) -> dict[str, int]:
    """The resident memory of the server's process, and of one device's."""
    found = {"SuperLink": 0, "worker": 0}
    names = {"anysize.deploy.superlink": "SuperLink", "anysize.deploy.process": "worker"}
    for pid, arguments in processes_of(home):
        name = next((own for text, own in names.items() if any(text in argument for argument in arguments)), None)
        if name is not None:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[name] = max(found[name], pages * os.sysconf("SC_PAGE_SIZE"))
    return found


def main() -> None:
    """Measures everything and writes it down."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "fleet"
        names = {f"device-{place}": 1.0 for place in range(DEVICES)}
        with Loopback(home, experiment(1, HIDDEN["0.1 MB"]), names) as fleet:
            fleet.serve()
            address = layout.address(home, layout.read(home).port, insecure=False)
            polls = polls_per_second(home, address)
            fleet.join()
            for name in names:
                fleet.wait(lambda name=name: "joined as node" in fleet.log(name), 120, name)  # type: ignore[misc]
            started = time.monotonic() - began
            by_devices = [measured(fleet, count, HIDDEN["0.1 MB"]) for count in COUNTS]
            by_payload = [measured(fleet, 4, hidden) for hidden in list(HIDDEN.values())[1:]]
            memory = memory_bytes(home)
    before = json.loads(OUT.read_text()) if OUT.exists() else {}
    found = {
        "environment": environment(),
        "by_devices": by_devices,
        "by_payload": [next(row for row in by_devices if row["devices"] == 4), *by_payload],
        "polls_per_second": round(polls, 1),
        "memory_bytes": memory,
        "seconds_to_start": round(started, 1),
        "seconds": round(time.monotonic() - began, 1),
        **{name: before[name] for name in ("in_turns", "with_supernodes") if name in before},  # measured once
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = ["| devices in a round | a message | seconds a round |", "| ---: | ---: | ---: |"]
    for row in [*found["by_devices"], *found["by_payload"][1:]]:
        lines.append(f"| {row['devices']} | {row['bytes_down'] / 1e6:.2g} MB | {row['round_seconds']:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table(json.loads(OUT.read_text())))
    else:
        main()
