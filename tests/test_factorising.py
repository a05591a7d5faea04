"""Methods that factorise weights say in a plan when they factorise little of a network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anysize.data import Data
from anysize.experiment.plan import plan
from anysize.methods import FLANC, FedHM, Method, OrigDrop, PriSM
from anysize.runs.experiment import Experiment
from anysize.testing import check_method

FACTORISING: dict[str, Method[Any]] = {"flanc": FLANC(), "prism": PriSM(), "fedhm": FedHM()}


def notices(method: Method[Any], network: nn.Module) -> list[str]:
    """Those of the plan."""
    x = torch.zeros(8, 1, 8, 8, dtype=torch.uint8)
    made = Experiment(
        data=Data(train=(x, torch.arange(8)), test=(x, torch.arange(8)), classes=10),
        clients=4,
        model=network,
        method=method,
        devices={"capacities": [0.5, 1.0]},
    )
    return plan(made)["notices"]


def separable() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 16, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 32, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def partly() -> nn.Module:
    """An ordinary convolution between two layers, and more parameters around it."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def ordinary() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


@pytest.mark.parametrize("name", FACTORISING)
def test_a_plan_says_that_nothing_of_a_depthwise_separable_network_is_factorised(name: str) -> None:
    (notice,) = notices(FACTORISING[name], separable())
    pointwise, depthwise, first, head = 16 * 8 + 32 * 16, 8 * 9 + 16 * 9, 8 * 9, 10 * 32
    vectors = 8 + 8 + 16 + 2 * 16 + 16 + 32 + 10
    total = pointwise + depthwise + first + head + vectors
    assert notice.startswith(f"{name}: 0 of {total:,} trained parameters are factorised (0%)")
    for count, kind in (
        (pointwise, "1 x 1 convolutions"),
        (depthwise, "depthwise convolutions"),
        (head, "layers whose outputs no width changes, as the classifier"),
        (vectors, "norms and biases"),
        (first, "layers that read the data"),
    ):
        assert f"{count:,} in {kind}" in notice
    assert "heterofl or fjord" in notice


@pytest.mark.parametrize("name", FACTORISING)
def test_a_plan_says_how_little_of_a_network_is_factorised(name: str) -> None:
    (notice,) = notices(FACTORISING[name], partly())
    inner = 8 * 8 * 9
    total = (8 * 9 + 8) + (inner + 8) + (64 * 8 + 64) + (10 * 64 + 10)
    assert notice.startswith(f"{name}: {inner} of {total:,} trained parameters are factorised ({inner / total:.0%})")
    assert f"{64 * 8} in 1 x 1 convolutions" in notice
    assert "depthwise" not in notice


def test_flanc_composes_1_x_1_convolutions_where_asked_and_says_what_that_gains() -> None:
    pointwise = 16 * 8 + 32 * 16
    (notice,) = notices(FLANC(), separable())
    assert notice.endswith(f"method.compose_pointwise = true composes {pointwise} more, those of 1 x 1 convolutions")
    (notice,) = notices(FLANC(compose_pointwise=True), separable())
    assert f"flanc: {pointwise} of " in notice
    assert "compose_pointwise" not in notice
    four = nn.Sequential(*list(separable())[:-1], nn.Linear(32, 4))
    check_method(FLANC(compose_pointwise=True, basis_inputs=0.5), four, whole_runs=False)


@pytest.mark.parametrize("name", FACTORISING)
def test_a_network_of_which_most_is_factorised_needs_no_notice(name: str) -> None:
    assert notices(FACTORISING[name], ordinary()) == []


def test_each_method_says_what_becomes_of_the_rest() -> None:
    methods = [*FACTORISING.values(), PriSM(channels="all"), FLANC(share_dense=True)]
    texts = [notices(method, partly())[0].split("; ")[1].split(". ")[0] for method in methods]
    assert len(set(texts)) == len(texts)
    assert notices(OrigDrop(), separable()) == []  # no method that factorises
