"""Options of methods: one check for all, from their annotations, in Python and from a file."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field

import anysize as az
from anysize import methods as m
from anysize.errors import ConfigError, MethodError
from anysize.methods.heterofl import HeteroFL

if TYPE_CHECKING:
    from collections.abc import Collection


def test_a_wrong_option_says_what_was_given_and_what_is_allowed() -> None:
    with pytest.raises(MethodError, match=r"^prism: kappa = -1; allowed: 0 or more$"):
        m.PriSM(kappa=-1)


def test_all_wrong_options_are_told_at_once_in_python() -> None:
    with pytest.raises(MethodError) as told:
        m.FLANC(orthogonality=math.inf, basis_size=1.5, execution="fast", share_unscaled=1)  # type: ignore[arg-type]
    assert str(told.value) == (
        "flanc: orthogonality = inf; allowed: 0 or more; basis_size = 1.5; allowed: above 0 and at most 1; "
        "share_unscaled = 1; allowed: true or false; execution = 'fast'; allowed: 'auto', 'compose', 'mix'"
    )


def test_all_wrong_options_are_told_at_once_from_a_file() -> None:
    with pytest.raises(ConfigError) as told:
        m.make("prism", {"kapa": 1.0, "kappa": -1, "channels": "last", "refresh_every": 1.5})
    assert str(told.value).splitlines() == [
        "method: unknown option of prism 'kapa'; did you mean 'kappa'? "
        "Known: channels, dropped, frobenius, kappa, momentum, refresh_every, sampling",
        "method.kappa = -1; allowed: 0 or more",
        "method.channels = 'last'; allowed: 'first', 'windows', 'drawn', 'all', 'mlp'",
        "method.refresh_every = 1.5; allowed: an integer, 1 or more",
    ]


WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (m.FedAvg, {"width": "all"}, "width = 'all'; allowed: 'weakest', 'each'"),
    (m.HeteroFL, {"scaler": 1}, "scaler = 1; allowed: true or false"),
    (m.FedHM, {"frobenius": math.nan}, "frobenius = nan; allowed: 0 or more"),
    (m.SplitMix, {"base_width": 1.01}, "base_width = 1.01; allowed: at least 0 and at most 1"),
    (m.OrigDrop, {"dropped": None}, "dropped = None; allowed: 'zero', 'kept'"),
    (m.ELF, {"sparsities": (0.0, 1.0)}, "sparsities = (0.0, 1.0); allowed: ascending numbers, at least 0 and below 1"),
    (m.ELF, {"sparsities": [0.5, 0.2]}, "sparsities = [0.5, 0.2]; allowed: ascending numbers, at least 0 and below 1"),
    (m.ELF, {"sparsities": ()}, "sparsities = (); allowed: ascending numbers"),
    (m.ELF, {"depths": (1, 1.5)}, "depths = (1, 1.5); allowed: a list of: an integer, 1 or more"),
    (m.ELF, {"widths": ()}, "widths = (); allowed: a list of: a number, above 0 and at most 1 (Value should"),
    (m.ELF, {"table": 3}, "table = 3; allowed: a string"),
    (m.OAT, {"encoding": True}, "encoding = True; allowed: an integer, 1 or more"),
    (m.FLANC, {"layers": 3}, "layers = 3; allowed: a table of name patterns"),
    (m.FLANC, {"layers": {"0.*": {"basis_inputs": 2}}}, "layers.'0.*'.basis_inputs = 2; allowed: a table of name patt"),
    (
        m.FLANC,
        {"layers": {"fc": {"basis": 0.5}}},
        "layers.fc.basis = 0.5; allowed: a table of name patterns",
    ),
]


@pytest.mark.parametrize("kind, options, words", WRONG, ids=[f"{kind.__name__}-{word}" for kind, _, word in WRONG])
def test_python_and_a_file_refuse_the_same(kind: type[Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(MethodError) as made:
        kind(**options)
    with pytest.raises(ConfigError) as read:
        m.make(kind.__name__.lower(), options)
    assert str(made.value).startswith(f"{kind.__name__.lower()}: {words}")
    assert str(read.value).startswith(f"method.{words}")


@pytest.mark.parametrize("name", [name for name, _ in m.methods()])
def test_what_a_run_writes_of_a_method_is_allowed_when_it_is_read_again(name: str) -> None:
    assert m.make(name, m.defaults(name)) == m.make(name)


def test_options_that_exclude_each_other_are_refused_in_python_and_from_a_file() -> None:
    options = {"ordered_dropout": True, "share_dense": True}
    with pytest.raises(MethodError, match="flanc: ordered_dropout together with share_dense; choose one of the two"):
        m.FLANC(**options)
    with pytest.raises(ConfigError, match="ordered_dropout together with share_dense"):
        m.make("flanc", options)
    with pytest.raises(ConfigError, match="ordered_dropout together with average = 'products'"):
        m.make("flanc", {"ordered_dropout": True, "average": "products"})


# Methods of one's own -----------------------------------------------------------------------------


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


@dataclasses.dataclass(frozen=True)
class Mine(HeteroFL):
    exponent: Annotated[float, Field(ge=-2, lt=2)] = 1.0
    mode: Literal["a", "b"] = "a"
    pairs: Annotated[int, AfterValidator(even)] = 2
    home: Path = Path("here")
    sizes_of: tuple[int, ...] = ()
    names: Collection[str] = ()  # imported for type checkers only
    steps: Collection | int = 3  # type: ignore[type-arg]
    limit: float = None  # type: ignore[assignment]

    def conflicts(self) -> list[str]:
        return ["mode = 'b' needs pairs = 4"] if self.mode == "b" and self.pairs != 4 else []


def test_a_method_of_ones_own_is_checked_without_a_line_of_its_own() -> None:
    with pytest.raises(MethodError) as told:
        Mine(exponent=2.0, mode="c", pairs=3, sizes_of=(1, "2"), limit="no", steps=0.5)  # type: ignore[arg-type]
    assert str(told.value) == (
        "mine: exponent = 2.0; allowed: at least -2 and below 2; mode = 'c'; allowed: 'a', 'b'; pairs = 3; "
        "allowed: even; sizes_of = (1, '2'); allowed: a list of: an integer; steps = 0.5; allowed: an integer; "
        "limit = 'no'; allowed: a number"
    )
    with pytest.raises(MethodError, match="mine: mode = 'b' needs pairs = 4"):
        Mine(mode="b")
    assert Mine(mode="b", pairs=4, sizes_of=[1, 2], names=("x",)).exponent == 1.0  # type: ignore[arg-type]


def test_a_file_gives_a_list_for_a_tuple_and_a_string_for_a_path() -> None:
    made = m.make(f"{__name__}:Mine", {"sizes_of": [1, 2], "home": "there", "names": ["x"]})
    assert made.sizes_of == (1, 2)  # type: ignore[attr-defined]


def test_an_experiment_refuses_a_wrong_option_of_its_method() -> None:
    with pytest.raises(az.AnysizeError, match=r"method\.exponent = 3; allowed: at least -2 and below 2"):
        m.make(f"{__name__}:Mine", {"exponent": 3})
