"""Every command of the README for Split-Mix starts."""

from __future__ import annotations

import re

import pytest

from anysize import config as configs
from anysize.config.tables import ExperimentConfig
from anysize.runs.experiment import Experiment
from test_experiments import FOLDER, little_data, parsed

__all__ = ["little_data"]  # small sets under the names of the real ones, for every test here
README = FOLDER / "splitmix" / "README.md"
FILES = sorted(README.parent.glob("*.toml"))
COMMANDS = sorted(set(re.findall(r"`(anysize run [^`]*\.toml[^`]*)`", README.read_text())))
FEW_DIGITS = ["data.options.size=14", "data.options.per_domain=300", "data.options.test_per_domain=20"]


def short(config: ExperimentConfig) -> list[str]:
    return FEW_DIGITS if config.data.name == "digits-domains" else ["data.clients=20"]


def test_every_file_has_a_command_and_every_command_a_folder_of_its_own() -> None:
    assert {FOLDER.parent / command.split()[2] for command in COMMANDS} == set(FILES)
    assert len({command.partition("--out ")[2] for command in COMMANDS}) == len(COMMANDS) >= 80


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_starts(command: str) -> None:
    config, _ = parsed(command)
    if config.data.name == "domainnet":  # test_data.py has its folders of images, test_experiments_all.py its plan
        assert Experiment.from_config(config).method is not None
        return
    experiment = Experiment.from_config(configs.loads(configs.dumps(config), short(config)))
    if "norms" not in command or "local" in command:  # the start of the others is the same
        assert experiment.method.init(experiment.context) is not None
    assert experiment.method is not None
