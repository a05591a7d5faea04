"""`anysize deploy init DIR`: everything that a fleet needs, in one folder.

experiment.toml          what is learned; beside it copies of the user's own modules that it names
fleet.toml               where the server listens
certificates/            the authority's and the server's; their private keys stay on the server
devices/NAME/            everything that one device needs: copy it there
app/                     the Flower app, for `flwr run`
flower/                  FLWR_HOME of the server: names the SuperLink for `flwr`
systemd/                 units as examples
runs/, logs/, state.db   written by the server
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from anysize import config as configs
from anysize.config.devices import files_in
from anysize.config.tables import ExperimentConfig
from anysize.deploy import device_file
from anysize.deploy.certificates import authority, device_key, server_certificate, write_private, wrong_hosts
from anysize.deploy.own_files import copy_into, own_files, undefined
from anysize.devices.fleet import open_fleet
from anysize.errors import ConfigError
from anysize.models import hub
from anysize.wire import Json

EXPERIMENT, FLEET, README = "experiment.toml", "fleet.toml", "README.md"
CERTIFICATES, DEVICES, APP, FLOWER, SYSTEMD = "certificates", "devices", "app", "flower", "systemd"
RUNS, LOGS, DATABASE = "runs", "logs", "state.db"
AUTHORITY, DEVICE, KEY, PUBLIC_KEY = "authority.crt", "device.toml", "key", "key.pub"
EXAMPLE = "anysize.deploy.example:digits"
NAME = "fleet"
"""What Flower calls the SuperLink of a fleet's folder."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS, _SERVER_DAYS = 3650, 825  # some clients refuse server certificates that are valid for longer


@dataclass(frozen=True)
class Address:
    """The address of a SuperLink, and the certificate of its authority; None for no TLS."""

    place: str
    authority: Path | None


@dataclass(frozen=True)
class Plan:
    """The input of `anysize deploy init`.

    Attributes:
        experiment: text of the experiment file.
        devices: their names, each with its capacity or budget as in device.toml.
        hosts: names and addresses under which devices reach the server, the first of them in each device.toml.
        port: the port of the server.
        data: the "package.module:function" that returns a device's data.
        options: its keyword arguments.
        allow: the user's own code that the experiment names.
        code: its files, for the server and for every device.
        data_code: the files of `data`, for devices alone.
        absent: modules that are named and lie beside neither the experiment nor the user.
    """

    experiment: str
    devices: Mapping[str, Json]
    hosts: Sequence[str]
    port: int
    data: str
    options: Mapping[str, object]
    allow: Sequence[str] = ()
    code: Sequence[Path] = ()
    data_code: Sequence[Path] = ()
    absent: Sequence[str] = ()

    @property
    def files(self) -> list[str]:
        """The names of the user's files that devices get, sorted."""
        return sorted({path.name for path in (*self.code, *self.data_code)})


@dataclass(frozen=True)
class Fleet:
    """What fleet.toml says: the address to listen on, the port, and the host name that devices use."""

    listen: str
    port: int
    host: str


def planned(
    file: Path | None,
    devices: Mapping[str, Json] | int | None,
    hosts: Sequence[str],
    port: int,
    data: str | None,
) -> Plan:
    """A plan with defaults: the example experiment, a device for each of its sizes, this machine."""
    text = _template(EXPERIMENT, least="1") if file is None else _experiment_text(file)
    config = configs.loads(text)
    if not config.own_data:
        raise ConfigError(
            f'{file}: data.name is "{config.data.name}"; on a fleet each device has its own data: set data.name = '
            '"devices", with model.input and task.classes'
        )
    kinds = _kinds(config)
    if devices is None or isinstance(devices, int):
        count = len(kinds) if devices is None else devices
        devices = {f"device-{place}": kinds[place % len(kinds)] for place in range(count)}
    if file is None:
        text = _template(EXPERIMENT, least=str(max(1, len(devices) // 2)))
    options: Json = {"devices": sorted(devices)} if data is None else {}
    plan = Plan(text, devices, list(hosts) or ["127.0.0.1"], port, data or EXAMPLE, options)
    return _with_code(plan, config, [Path() if file is None else file.parent, Path()])


def named(pairs: Sequence[str]) -> dict[str, Json]:
    """Devices as the command line gives them.

    >>> named(["cam=0.25", "van=1"])
    {'cam': {'capacity': 0.25}, 'van': {'capacity': 1.0}}
    """
    found: dict[str, Json] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            capacity = float(text)
        except ValueError:
            raise ConfigError(f"device {pair!r}: write NAME=CAPACITY, for example cam=0.25") from None
        if not 0 < capacity <= 1 or name in found:
            raise ConfigError(f"device {pair!r}: a capacity is above 0 and at most 1, and a name occurs once")
        found[name] = {"capacity": capacity}
    return found


def extend(home: Path, devices: Mapping[str, Json], data: str | None) -> None:
    """Add devices to a fleet's folder; nothing in it changes."""
    fleet = read(home)
    text = _experiment_text(home / EXPERIMENT)
    names = sorted({*device_keys(home), *devices})
    options: Json = {"devices": names} if data is None else {}
    plan = Plan(text, devices, [fleet.host], fleet.port, data or EXAMPLE, options)
    others = [path.parent for path in device_keys(home).values()]
    add_devices(home, _with_code(plan, configs.loads(text), [home, *others, Path()]))


def _with_code(plan: Plan, config: ExperimentConfig, folders: Sequence[Path]) -> Plan:
    """The plan with the user's own code that it names, from these folders."""
    own = [name for name in (config.model.name, config.method.name, config.task.name) if ":" in name]
    code, absent = own_files([name for name in own if hub.function(name) is None], folders)
    data_code, more = own_files([] if plan.data == EXAMPLE else [plan.data], folders)
    missing = sorted({*absent, *more})
    if plan.data != EXAMPLE and (file := undefined(plan.data, folders)) is not None:
        raise ConfigError(f"--data {plan.data}: {file} has no '{plan.data.partition(':')[2]}'")
    return replace(plan, allow=own, code=code, data_code=data_code, absent=missing)


def lay_out(home: Path, plan: Plan, overwrite: bool = False) -> None:
    """Write the folder; an error if it holds a fleet, unless that may be overwritten, keys included."""
    wrong = [f"device name {name!r}: use only letters, digits, - _ ." for name in plan.devices if not _is_name(name)]
    wrong += [f"host {host!r}: a name or an address without port and prefix" for host in wrong_hosts(plan.hosts)]
    wrong += [] if 0 < plan.port < 65536 else [f"port {plan.port}: must be between 1 and 65535"]
    if wrong:
        raise ConfigError("\n".join(wrong))
    taken = [name for name in (EXPERIMENT, FLEET, CERTIFICATES) if (home / name).exists()]
    if home.is_file() or (not taken and home.is_dir() and any(home.iterdir())):
        raise ConfigError(f"{home} is not a fleet's folder and not empty; choose another")
    if taken and not overwrite:
        raise ConfigError(
            f"{home} already holds a fleet; replace it, keys and all, with --overwrite, or add devices with `anysize "
            f"deploy add {home} NAME=CAPACITY`"
        )
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.chmod(0o700)  # it holds private keys
    _text(home / EXPERIMENT, plan.experiment)
    copy_into(home, plan.code)
    _write_certificates(home / CERTIFICATES, list(dict.fromkeys([*plan.hosts, *_LOOPBACK])))
    outside = any(host not in _LOOPBACK for host in plan.hosts)
    listen = "0.0.0.0" if outside else "127.0.0.1"
    _text(home / FLEET, f"listen = {json.dumps(listen)}\nport = {plan.port}\nhost = {json.dumps(plan.hosts[0])}\n")
    shutil.rmtree(home / DEVICES, ignore_errors=True)
    add_devices(home, plan)
    write_app(home / APP)
    write_connection(home, address(home, plan.port, insecure=False))
    command = str(Path(sys.executable).parent / "anysize")
    for name in ("server", "device@"):
        unit = _template(f"{name}.service", home=str(home.resolve()), command=command)
        _text(home / SYSTEMD / f"anysize-{name}.service", unit)
    _text(home / README, _template(README, home=str(home), server=f"{plan.hosts[0]}:{plan.port}"))
    _text(home / ".gitignore", "*\n")  # private keys do not belong in a repository


def add_devices(home: Path, plan: Plan) -> None:
    """Write the folder of each device: its file, its key, the authority's certificate, the experiment."""
    for name, can in plan.devices.items():
        folder = home / DEVICES / name
        if (folder / KEY).exists():
            raise ConfigError(f"{folder} exists already; delete it to give the device a new key")
        folder.mkdir(parents=True, mode=0o700)
        pair = device_key()
        write_private(folder / KEY, pair.private)
        (folder / PUBLIC_KEY).write_bytes(pair.public)
        shutil.copyfile(home / CERTIFICATES / AUTHORITY, folder / AUTHORITY)
        _text(folder / EXPERIMENT, plan.experiment)
        copy_into(folder, [*plan.code, *plan.data_code])
        _text(folder / DEVICE, device_text(name, can, plan))


def device_text(name: str, can: Json, plan: Plan) -> str:
    """A device's file."""
    host = f"[{plan.hosts[0]}]" if ":" in plan.hosts[0] else plan.hosts[0]
    about: Json = {"name": name, "server": f"{host}:{plan.port}", "key": KEY, "certificate": AUTHORITY}
    about |= {"data": plan.data, "options": dict(plan.options), "allow": list(plan.allow)}
    # Without it, a server could take the line out of its experiment, and see single updates.
    threshold = configs.loads(plan.experiment).aggregation.secure_threshold
    return device_file.written(about | can | ({} if threshold is None else {"secure_threshold": threshold}))


def read(home: Path) -> Fleet:
    """What a fleet's folder says about its server."""
    try:
        found = tomllib.loads((home / FLEET).read_text(encoding="utf-8"))
        return Fleet(str(found["listen"]), int(found["port"]), str(found["host"]))
    except FileNotFoundError:
        raise ConfigError(
            f"{home} is not a fleet's folder ({FLEET} is missing); `anysize deploy init` makes one"
        ) from None
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{home / FLEET} is damaged: {error}") from None


def device_keys(home: Path) -> dict[str, Path]:
    """The public key of each device in a fleet's folder, by its name, sorted."""
    return {path.parent.name: path for path in sorted((home / DEVICES).glob(f"*/{PUBLIC_KEY}"))}


def address(home: Path, port: int, insecure: bool) -> Address:
    """The address of a folder's SuperLink on its own machine."""
    return Address(f"127.0.0.1:{port}", None if insecure else (home / CERTIFICATES / AUTHORITY).resolve())


def write_connection(home: Path, place: Address) -> None:
    """Write the SuperLink's entry for Flower's command: `FLWR_HOME=DIR/flower flwr run DIR/app fleet`."""
    secure = f"root-certificates = {json.dumps(str(place.authority))}" if place.authority else "insecure = true"
    lines = ["[superlink]", f'default = "{NAME}"', "", f"[superlink.{NAME}]", f'address = "{place.place}"', secure, ""]
    _text(home / FLOWER / "config.toml", "\n".join(lines))


def write_app(folder: Path) -> Path:
    """Write the Flower app, and return its folder."""
    package = folder / "anysize_fleet"
    _text(folder / "pyproject.toml", _template("pyproject.toml"))
    _text(folder / "LICENSE", "Licensed under the Apache License, Version 2.0.\n")
    _text(package / "__init__.py", '"""A run of anysize on a fleet; server and devices have anysize installed."""\n')
    for side in ("server", "client"):
        line = f"from anysize.deploy.app import {side}_app as app"
        _text(package / f"{side}_app.py", f'"""The {side}\'s side."""\n\n{line}\n\n__all__ = ["app"]\n')
    return folder


def _write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True, mode=0o700)
    signer = authority("anysize fleet", _AUTHORITY_DAYS)
    server = server_certificate(signer, hosts, _SERVER_DAYS)
    write_private(folder / "authority.key", signer.private)
    write_private(folder / "server.key", server.private)
    (folder / AUTHORITY).write_bytes(signer.public)
    (folder / "server.crt").write_bytes(server.public)


def _experiment_text(file: Path) -> str:
    """The text of an experiment file, with the content of files that it names; an error if it is not valid."""
    config, text = configs.load(file), file.read_text(encoding="utf-8-sig")
    return configs.dumps(config) if files_in(configs.parse(text, str(file))) else text


def _kinds(config: ExperimentConfig) -> list[Json]:
    """The capacity or budget of a device for each of the experiment's sizes, smallest first."""
    groups = open_fleet(config.devices, config.seed).groups
    return [{"capacity": g.capacity} if g.budget is None else {"budget": g.budget.limits()} for g in groups]


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) is not None


def _template(file: str, **values: str) -> str:
    """A file of `templates/` with every <<name>> replaced."""
    text = (files("anysize.deploy") / "templates" / file).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"<<{key}>>", value)
    return text


def _text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
