"""The command line of fleets: `anysize deploy init`, `deploy add`, `server` and `join`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from anysize.errors import UsageError

out = Console(highlight=False, soft_wrap=True)

app = typer.Typer(name="deploy", help="Lay out a fleet of real devices.", no_args_is_help=True, suggest_commands=False)

Home = Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder.", show_default=False)]
Device = Annotated[
    list[str] | None,
    typer.Option("--device", metavar="NAME=CAPACITY", help="A device and the fraction of the model that it can train."),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="MODULE:FUNCTION", help="The source of a device's data; by default digits."),
]
Port = Annotated[int | None, typer.Option("--port", help="By default the one in fleet.toml.", show_default=False)]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS and keys: only for trying things out.")]


@app.command()
def init(
    home: Home,
    file: Annotated[Path | None, typer.Argument(help="The experiment file; by default an example.")] = None,
    device: Device = None,
    devices: Annotated[
        int | None, typer.Option("--devices", help="This many devices, with the experiment's capacities in turn.")
    ] = None,
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address of the server, as devices reach it; repeatable.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="The port of the server; 0: any free one.")] = 8000,
    data: Data = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the fleet in the folder, keys too.")] = False,
) -> None:
    """Make a folder with everything that a fleet needs: certificates, a key for each device, start commands."""
    from anysize.deploy import folder as layout
    from anysize.deploy.check import tried
    from anysize.deploy.children import free_port

    if device and devices is not None:
        raise UsageError("give either --device or --devices")
    wanted = layout.named(device) if device else devices
    plan = layout.planned(file, wanted, host or [], port or free_port(), data)
    notices = [] if file is None or plan.absent else tried(file)
    layout.lay_out(home, plan, overwrite)
    say(f"{home}: {len(plan.devices)} devices ({', '.join(plan.devices)}), server {plan.hosts[0]}:{plan.port}")
    if plan.files:
        say(f"copied {', '.join(plan.files)} into the folder of each device")
    if plan.absent:
        say(f"not beside the experiment: {', '.join(plan.absent)}; install it on the server and on the devices")
    if data is None:
        say("note: no --data given, so every device gets a part of the example's handwritten digits")
    for notice in notices:
        say(f"note: {notice}")
    say(f"next: anysize server {home}   and on each device: anysize join {home}/devices/NAME/device.toml")
    say(f"then: anysize run {home / layout.EXPERIMENT} --engine flower --superlink {home}")


@app.command()
def add(
    home: Home, device: Annotated[list[str], typer.Argument(metavar="NAME=CAPACITY...")], data: Data = None
) -> None:
    """Make the folders of more devices; they may join after the server's next start."""
    from anysize.deploy import folder as layout

    names = layout.named(device)
    layout.extend(home, names, data)
    say(f"{home}: added {', '.join(names)}; restart `anysize server {home}`, so that it knows their keys")


def server(
    home: Home,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on; by default fleet.toml's.")] = None,
    port: Port = None,
    insecure: Insecure = False,
) -> None:
    """Run the server of a fleet until it is stopped; runs are started with `anysize run --superlink`."""
    from anysize.deploy.server import serve

    serve(home, host=host, port=port, insecure=insecure, say=say)


def join(
    file: Annotated[Path, typer.Argument(metavar="DEVICE.TOML", help="The device's own file.", show_default=False)],
    insecure: Insecure = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="First measure what this device can train, and write it into its file.")
    ] = False,
) -> None:
    """Take part in a fleet with this device until it is stopped."""
    from anysize.deploy.join import join as take_part
    from anysize.deploy.process import afresh

    if measure:
        from anysize.deploy.selftest import measured

        measured(file, insecure=insecure, say=say)
        afresh(["join", str(file), *(["--insecure"] if insecure else [])])
    take_part(file, insecure=insecure, say=say)


def say(text: str) -> None:
    out.print(text, markup=False)
    out.file.flush()
