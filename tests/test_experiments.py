"""Every experiment file loads, plans and starts, and so does every command that a README gives for it."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from anysize import config as configs
from anysize.config.tables import ExperimentConfig
from anysize.methods import FLANC
from anysize.runs.experiment import Experiment
from small import fast_if

FOLDER = Path(__file__).parents[1] / "experiments"
FILES = sorted((FOLDER / "flanc").glob("*.toml"))  # of other papers' sets there is no little copy here
COMMANDS = sorted(
    {
        command
        for readme in sorted((FOLDER / "flanc").glob("README.md"))
        for command in re.findall(r"`(anysize (?:run|compare) [^`]*\.toml[^`]*)`", readme.read_text())
    }
)


def images(path: Path, size: int, channels: int, classes: int, each: int) -> None:
    """A set in the documented format: random images, `each` training samples of every class."""
    random = np.random.default_rng(0)
    shape = (size, size, 3) if channels == 3 else (size, size)
    parts = {}
    for part, count in (("train", each * classes), ("test", 2 * classes)):
        parts[f"x_{part}"] = random.integers(256, size=(count, *shape), dtype=np.uint8)
        parts[f"y_{part}"] = (np.arange(count) % classes).astype(np.uint8)
    np.savez(path, **parts)


@pytest.fixture(scope="module", autouse=True)
def little_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Small sets under the names of the real ones."""
    folder = tmp_path_factory.mktemp("data")
    images(folder / "fashion-mnist.npz", 28, 1, 10, 60)
    for name in ("mnist", "usps", "mnist-m", "svhn", "synth-digits"):
        images(folder / f"{name}.npz", 16, 1, 10, 60)
    images(folder / "cifar10.npz", 32, 3, 10, 60)
    images(folder / "cifar100.npz", 32, 3, 100, 60)
    with gzip.open(folder / "shakespeare.jsonl.gz", "wt") as file:
        for role in range(120):
            file.write(json.dumps({"user": str(role), "text": "to be or not to be. " * 60}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYSIZE_DATA", str(folder))
        yield folder


def parsed(command: str) -> tuple[ExperimentConfig, list[str]]:
    """The config that a command would run, and its methods."""
    words = shlex.split(command)
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    config = configs.load(FOLDER.parent / words[2], overrides)
    methods = words[words.index("--methods") + 1].split(",") if "--methods" in words else [config.method.name]
    return config, methods


def started(config: ExperimentConfig) -> Experiment:
    """The experiment with its shares and fleet, after the smallest client's message was made and built."""
    experiment = Experiment.from_config(config)
    experiment.tabulates = False  # a look-up table trains networks
    context, method = experiment.context, experiment.method
    assert len(experiment.shares) == experiment.fleet.clients
    cost = experiment.cost(context.sizes[0])
    assert cost.parameters > 0
    assert method.notices(context) == []
    return experiment


def test_there_are_files_and_commands() -> None:
    assert len(FILES) >= 6
    assert len(COMMANDS) >= 30
    assert {FOLDER.parent / shlex.split(command)[2] for command in COMMANDS} >= set(FILES) - {
        FOLDER / "flanc" / name for name in ("parts.toml", "study.toml")
    }


@pytest.mark.parametrize(
    "path",
    fast_if(lambda path: path.stem in ("fashion-mnist", "shakespeare"), FILES),
    ids=lambda path: f"{path.parent.name}/{path.name}",
)
def test_a_file_plans_and_starts(path: Path) -> None:
    assert path.read_text().startswith("# ")
    started(configs.load(path))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_can_be_given(command: str) -> None:
    config, methods = parsed(command)
    for name in methods:
        options = config.method.options if name == config.method.name else {}
        tables = config.model_dump(exclude_none=True) | {"method": {"name": name, **options}}
        assert Experiment.from_config(configs.from_dict(tables)).method is not None


def test_every_command_has_a_folder_of_its_own() -> None:
    folders = [shlex.split(command)[-1] for command in COMMANDS]
    assert all("--out" in command for command in COMMANDS)
    assert len(set(folders)) == len(folders)


def test_the_ablation_asks_for_the_papers_fractions_of_the_smallest_input() -> None:
    """R1 at 25, 50 and 100 % of the smallest input: layers with 64 to 512 inputs, the smallest a quarter of them."""
    path = FOLDER / "flanc" / "ablation.toml"
    for fraction, part in ((0.0625, 0.25), (0.125, 0.5), (0.25, 1.0)):
        experiment = Experiment.from_config(configs.load(path, [f"method.basis_inputs={fraction}"]))
        method, context = experiment.method, experiment.context
        assert isinstance(method, FLANC)
        for name, factors in method.factors(context).items():
            smallest = context.axes.shape(name, context.axes.kept(1.0))[1] // 4  # of the whole stem's outputs too
            assert factors.inputs == part * smallest, name


@pytest.mark.parametrize("width", [0.25, 0.5, 0.75, 1.0])
def test_the_lstm_has_the_papers_counts(width: float) -> None:
    """Table 1, Shakespeare: 737,280 p^2 + 1,024 p + 1,920 with FLANC, 786,432 p^2 + 1,024 p dense, of one bias."""
    experiment = Experiment.from_config(configs.load(FOLDER / "flanc" / "shakespeare.toml"))
    context, state = experiment.context, experiment.method.init(experiment.context)
    own, dense = state.coefficients[str(width)], state.dense[str(width)]
    found = sum(tensor.numel() for tensor in (*own.values(), *state.basis.values(), dense["lstm.bias_ih_l0"]))
    assert found == 737_280 * width**2 + 1_024 * width + 1_920
    weights = [
        context.skeleton(width).get_parameter(f"lstm.{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih")
    ]
    assert sum(weight.numel() for weight in weights) == 786_432 * width**2 + 1_024 * width


FULL_PROJECTION = 64 * 64 + 2 * 64  # a 1x1 convolution and its norm, which the authors' full network does not have


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("cifar10", (710_826, 2_809_866, 6_298_986, 11_173_962 + FULL_PROJECTION)),
        ("cifar100", (722_436, 2_832_996, 6_333_636, 11_220_132 + FULL_PROJECTION)),
    ],
)
def test_the_dense_resnet_has_the_counts_of_the_authors_code(name: str, counts: tuple[int, ...]) -> None:
    context = Experiment.from_config(configs.load(FOLDER / "flanc" / f"{name}.toml")).context
    readme = (FOLDER / "flanc" / "README.md").read_text()
    for size, count in zip(context.sizes, counts):
        assert sum(parameter.numel() for parameter in context.skeleton(size.width).parameters()) == count
        assert name != "cifar10" or f" / {count / 1000:,.1f} |" in readme


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("cifar10", (530_858, 1_219_594, 2_362_986, 3_956_810 + FULL_PROJECTION)),
        ("cifar100", (542_468, 1_242_724, 2_397_636, 4_002_980 + FULL_PROJECTION)),
    ],
)
def test_the_composed_resnet_has_the_counts_of_the_authors_code(name: str, counts: tuple[int, ...]) -> None:
    experiment = Experiment.from_config(configs.load(FOLDER / "flanc" / f"{name}.toml"))
    state = experiment.method.init(experiment.context)
    readme = (FOLDER / "flanc" / "README.md").read_text()
    for size, count in zip(experiment.context.sizes, counts):
        assert experiment.cost(size, state=state).parameters == count
        assert name != "cifar10" or f" / {count / 1000:,.1f} |" in readme
