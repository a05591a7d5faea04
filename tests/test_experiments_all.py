"""Every experiment file of every paper, and every command of their READMEs, on a machine that has no data at all."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anysize import config as configs
from anysize.config.tables import ExperimentConfig
from anysize.data import files
from anysize.experiment.lookup import fingerprint
from anysize.experiment.plan import plan
from anysize.runs.experiment import Experiment

FOLDER = Path(__file__).parents[1] / "experiments"
FILES = sorted(FOLDER.glob("*/*.toml"))
PAGES = [*sorted(FOLDER.glob("*/README.md")), FOLDER / "flanc" / "study.md"]


def commands(page: Path) -> Iterator[str]:
    """The commands of a page that begin an experiment, in spans and in blocks, broken lines joined."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"`(anysize [^`]*)`", text) + re.findall(r"^(?: {4})?(anysize .*)$", text, re.MULTILINE)
    yield from (command for command in found if ".toml" in command)


def recorded() -> Iterator[str]:
    """The commands in the CSV files that begin an experiment of their own; cells of comparisons are in the files."""
    for path in sorted(FOLDER.glob("*/results/*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            every = {row["command"].partition(" && ")[0] for row in csv.DictReader(file)}
        yield from (command for command in every if command.startswith("anysize ") and " --only " not in command)


COMMANDS = sorted({command for page in PAGES for command in commands(page)})
RECORDED = sorted({re.sub(r" --set seed=\d+", "", command.partition(" (")[0]) for command in recorded()})
SMALL = {  # the same structure with fewer channels: a full one takes seconds to plan and minutes to train
    "alexnet": [],
    "char-lstm": ["embedding=32", "hidden=32"],
    "digits-cnn": [],
    "elf-cnn": [],
    "femnist-cnn": ["channels=[8,8]"],
    "flanc-cnn": [],
    "preresnet18": ["channels=[8,16,16,16]"],
    "resnet18": ["channels=[16,16,16,32]"],
    "resnet14": ["channels=[4,8,8]"],
    "resnet20": ["channels=[4,8,8]"],
    "resnet32": ["channels=[4,8,8]"],
    "small-cnn": ["channels=[8,8,16]"],
    "text-lstm": ["embedding=16", "hidden=32"],
    "vgg11": ["channels=[8,8,8,8,8,8,8,16]"],
    "vit-tiny": ["depth=2", "width=48"],
}
HEAVY = ("alexnet",)
WHOLE = {"cifar10-16": "cifar10", "cifar10-small": "cifar10", "emnist-part": "emnist"}
"""Of parts of public sets, which are files of one's own, the public set: it stands in for them here."""


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was downloaded")

    monkeypatch.setenv("ANYSIZE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setattr(files, "download", refuse)


def small(config: ExperimentConfig, *more: str) -> ExperimentConfig:
    """The experiment with a little network of the same kind."""
    network = [f"model.options.{option}" for option in SMALL.get(config.model.name, ())]
    if config.data.name == "digits-domains":
        network.append("data.options.size=8")
    network.append(f"data.name={WHOLE.get(config.data.name, config.data.name)}")
    return configs.from_dict(config.to_dict(), [*network, *more], folder=config.folder)


def parsed(command: str) -> tuple[ExperimentConfig, list[str]]:
    """The config that a command would run, and its methods; a shell reads it as it stands."""
    words = shlex.split(command)
    assert words[1] in ("run", "compare", "plan"), command
    assert not set(words) & {"...", "NAME", "FILE"} or "runs/study/NAME" in command
    overrides = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    known = {"--set", "--out", "--methods", "--seeds", "--only"}
    assert {word for word in words if word.startswith("--")} <= known, command
    config = configs.load(FOLDER.parent / words[2], overrides)
    methods = words[words.index("--methods") + 1].split(",") if "--methods" in words else [config.method.name]
    return config, methods


def named(paths: list[Path], *keys: str) -> list[Any]:
    """The paths as parameters; heavy ones are slow, and all but the first with the same names in these tables."""
    seen: set[tuple[str, ...]] = set()
    found = []
    for path in paths:
        config = configs.load(path)
        kind = tuple(getattr(config, key).name for key in keys)
        slow = config.model.name in HEAVY or kind in seen
        seen.add(kind)
        found.append(pytest.param(path, id=f"{path.parent.name}/{path.stem}", marks=[pytest.mark.slow] if slow else []))
    return found


def test_all_papers_have_files_and_commands() -> None:
    assert len(FILES) >= 30
    rooms = {"benchmark", "demo", "elf", "flanc", "lora", "prism", "splitmix", "trust", "wire"}
    assert {path.parent.name for path in FILES} <= rooms
    assert len(COMMANDS) >= 90
    assert all(path.read_text().startswith("# ") for path in FILES)


@pytest.mark.parametrize("path", named(FILES, "data"))
def test_a_file_is_planned_without_its_data(path: Path) -> None:
    config = small(configs.load(path))
    made = plan(Experiment.from_config(config))
    clients = sum(group["clients"] for group in made["groups"])
    assert clients == config.data.clients
    assert all(group["parameters"] > 0 and group["bytes_up"] > 0 for group in made["groups"])


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_file_is_planned_with_its_own_network(path: Path) -> None:
    name = configs.load(path).data.name
    config = configs.load(path, [f"data.name={WHOLE.get(name, name)}"])
    assert plan(Experiment.from_config(config))["groups"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_split_of_every_file_can_be_made_iid(path: Path) -> None:
    config = configs.load(path, ["data.split=iid"])
    assert config.data.split == "iid"
    assert (config.data.clients or 0) >= 1


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_pasted(command: str) -> None:
    config, methods = parsed(command)
    for name in methods:
        options = config.method.options if name == config.method.name else {}
        tables = config.to_dict() | {"method": {"name": name, **options}}
        assert Experiment.from_config(configs.from_dict(tables, folder=config.folder)).method is not None


def test_commands_that_name_one_look_up_table_ask_for_the_same_one() -> None:
    """A table in a file is refused for another experiment, so commands can be given one after another only then."""
    tables: dict[Path, dict[str, list[str]]] = {}
    for command in (*COMMANDS, *RECORDED):
        config, _ = parsed(command)
        if config.compare is None and config.method.name == "elf":
            about = json.dumps(fingerprint(Experiment.from_config(small(config)).without_data()), sort_keys=True)
            path = FOLDER.parent / shlex.split(command)[2]
            tables.setdefault(path.parent / config.method.options["table"], {}).setdefault(about, []).append(command)
    assert len(tables) >= 20
    for path, uses in tables.items():
        assert len(uses) == 1, (path.name, [commands[0] for commands in uses.values()])


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({*COMMANDS, *RECORDED}))
def test_a_command_is_planned(command: str) -> None:
    config, methods = parsed(command)
    if config.model.name in HEAVY:
        pytest.skip("planned by its file")
    for name in methods:
        options = config.method.options if name == config.method.name else {}
        tables = small(config).to_dict() | {"method": {"name": name, **options}}
        assert plan(Experiment.from_config(configs.from_dict(tables, folder=config.folder)))["groups"]
