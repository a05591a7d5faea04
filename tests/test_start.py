"""A quick start: torch's compiler is loaded by who compiles, and by nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anysize.engines import start

_PROGRAM = """
import sys
from anysize.engines.start import quick_start
quick_start()
import torch
from anysize.client.optimizer import take_step
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=0.5)
parameter.sum().backward()
take_step(optimizer)
x = torch.ones(2, device="meta")
(x - x) / x
print("torch._dynamo" in sys.modules, parameter.tolist())
print(torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.zeros(1)).item())
optimizer.zero_grad()
optimizer.step()
print("torch._dynamo" in sys.modules)
"""


def test_optimisers_and_the_meta_device_do_without_the_compiler_which_still_works() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False [0.5, 0.5, 0.5]", "1.0", "True"]


def test_the_collector_leaves_out_what_torch_made_and_goes_on_with_the_rest() -> None:
    program = """
import gc
from anysize.engines.start import quick_start
quick_start()
import torch
print(gc.isenabled(), gc.get_freeze_count() > 100_000, len(gc.get_objects()) < 100_000)
print(torch.__spec__.loader.is_package("torch"), torch.ones(2).sum().item())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True True True", "True 2.0"]


def test_the_meta_device_does_without_symbols_which_still_work() -> None:
    program = """
import sys
from anysize.engines.start import quick_start
quick_start()
import torch
network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
y = network.to("meta")(torch.ones(2, 3, 8, 8, device="meta"))
print(tuple((y - y.mean()).shape), "sympy.core" in sys.modules, "torch.utils._sympy.functions" in sys.modules)
import sympy
class Own(sympy.Basic): pass
from sympy.printing.precedence import precedence
print(isinstance(sympy.Symbol("x"), sympy.Basic), issubclass(Own, sympy.core.Basic), sympy.Basic is sympy.core.Basic)
from torch._subclasses.fake_tensor import FakeTensorMode
early = torch.fx.experimental.symbolic_shapes.guard_or_false
from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false
x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 3))
print(type((x + 1).shape[0]).__name__, early(x.shape[0] == 5), guard_or_false(x.shape[0] == 4), early is guard_or_false)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "(2, 4, 3, 3) False False",
        "True True True",
        "SymInt True False False",
    ]


_PARTS = [
    "import sympy.logic.boolalg",
    "from sympy.logic.boolalg import true",
    "import importlib, sympy.logic; importlib.reload(sympy.logic)",
]


@pytest.mark.parametrize("asks", _PARTS)
def test_a_part_of_the_algebra_can_be_asked_for_first_and_is_made_once(asks: str) -> None:
    program = f"""
import sys
from anysize.engines.start import quick_start
quick_start()
import torch
torch.ones(2, device="meta") - 1
import sympy
before = sys.modules["sympy"]
{asks}
print(sympy is before, sympy.logic.boolalg.true is sympy.true, sympy.logic is sys.modules["sympy.logic"])
print(type(sympy.logic.__spec__.loader).__name__, sympy.logic.__spec__.name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True True True", "SourceFileLoader sympy.logic"]


def test_checks_of_tensors_and_strides_do_without_symbols_too() -> None:
    program = """
import sys
from anysize.engines.start import quick_start
quick_start()
import torch
whole, part = torch.zeros(4, 6, device="meta"), torch.zeros(4, 2, device="meta")
print(tuple(torch.ops.aten.slice_scatter.default(whole, part, 1, 2, 4).shape))
from torch._prims_common import is_non_overlapping_and_dense_or_false
print(is_non_overlapping_and_dense_or_false(whole), "sympy.core" in sys.modules)
from torch.utils._sympy.functions import Max
import sympy
print(Max(sympy.Symbol("x"), 3).subs("x", 5), isinstance(Max(sympy.Symbol("x"), 3), Max))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["(4, 6)", "True False", "5 True"]


@pytest.mark.parametrize("name", start._OF_NUMBERS)
def test_plain_values_are_judged_as_pytorch_judges_them(name: str) -> None:
    from torch.fx.experimental import symbolic_shapes

    examples: dict[str, list[tuple[Any, ...]]] = {
        "is_nested_int": [(3,), (True,)],
        "has_guarding_hint": [(3,), (True,)],
        "guarding_hint_or_throw": [(3,), (True,), (False,)],
        "free_unbacked_symbols": [(torch.ones(2, 3, device="meta"),)],
        "sym_eq": [((1, 2), [1, 2]), ((1, 2), (1, 3)), ((1,), (1, 2)), (3, 3), (3, 4)],
        "sym_and": [(True,), (True, False), (True, True, True)],
        "sym_or": [(False,), (False, True), (False, False)],
    }
    for values in examples.get(name, [(True,), (False,)]):
        assert start._OF_NUMBERS[name](*values) == getattr(symbolic_shapes, name)(*values)


def test_a_misspelt_name_is_answered_before_torch_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('data = { name = "digits", clients = 2 }\nmodel.name = "mpl"\nmethod.name = "flank"\n')
    program = (
        f"import sys; sys.argv = ['anysize', 'run', {str(file)!r}]\n"
        "from anysize.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert "did you mean 'flanc'" in done.stderr
    assert "did you mean 'mlp'" in done.stderr
