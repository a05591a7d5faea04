"""FLANC's two ways to compute a layer, and what a training step costs beside the dense one of the same width.

    python benchmarks/flanc_ways.py [layers] [steps]

`layers` times both ways at every composed layer's shape; `elastic.basis.MIX_BELOW` is read off it. `steps` times whole
training steps against HeteroFL's networks without its scaler, which are the dense networks of each width. Batch 32, one
thread, channels_last, as a client trains. Times are CPU seconds of this one thread, the shortest of several alternated
repetitions, since machines are noisy. Written to benchmarks/flanc_ways.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import machine
from torch import Tensor, nn

from anysize.client.networks import built
from anysize.client.objectives import make_objective
from anysize.client.optimizer import make_optimizer
from anysize.client.process import hold_memory
from anysize.data import Data
from anysize.elastic.basis import Composed, mixing_pays
from anysize.elastic.fast import layout
from anysize.methods import FLANC, HeteroFL, Method
from anysize.methods.messages import Client
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.runs.experiment import Experiment

RESULTS = Path(__file__).with_suffix(".json")
BATCH = 32
MODELS = {"small-cnn": (1, 28, 28), "flanc-cnn": (1, 28, 28), "resnet18": (3, 32, 32), "mlp": (1, 28, 28)}
KEEP = {"flanc-cnn": ("stem",)}


def experiment(model: str, method: Method[Any]) -> Experiment:
    """One of the networks on images of zeros, four widths."""
    images = np.zeros((200, *MODELS[model]), dtype=np.uint8)
    data = Data(train=(images, np.arange(200) % 10))
    return Experiment(data=data, clients=10, model=model, keep=KEEP.get(model, ()), method=method)


def shortest(calls: dict[str, Callable[[], None]], times: int) -> dict[str, float]:
    """Milliseconds of each call, the shortest of `times`, taken in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(times + 1):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn:  # the first warms up
                best[name] = min(best[name], (time.process_time() - began) * 1000)
    return best


def layer_inputs(made: Experiment, width: float, names: list[str]) -> dict[str, torch.Size]:
    """The shape of what enters each composed weight's layer at batch 32."""
    network = made.context.skeleton(width)
    shapes: dict[str, torch.Size] = {}

    def note(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        shapes[name] = inputs[0].shape

    handles = [
        network.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(partial(note, name)) for name in names
    ]
    with torch.device("meta"):
        meta = made.signature.example(BATCH)
    network(meta)
    for handle in handles:
        handle.remove()
    return shapes


def both_ways(model: str) -> Iterator[dict[str, Any]]:
    """One row per distinct layer shape and width: dense, composed and mixed."""
    made = experiment(model, FLANC())
    factors = made.method.factors(made.context)  # type: ignore[attr-defined]
    seen = set()
    for size in made.sizes:
        network = made.context.skeleton(size.width)
        inputs = layer_inputs(made, size.width, list(factors))
        for name, f in factors.items():
            layer = network.get_submodule(name.rpartition(".")[0])
            weight = layer.get_parameter("weight")
            shape = (tuple(weight.shape), tuple(inputs[name]), f.inputs, f.size, getattr(layer, "stride", None))
            if shape in seen:
                continue
            seen.add(shape)
            yield one_layer(model, name, size, layer, f.inputs, f.size, inputs[name])


def one_layer(
    model: str, name: str, size: Size, layer: nn.Module, inputs: int, count: int, shape: torch.Size
) -> dict[str, Any]:
    """The times of forward and backward of one layer, dense and both ways."""
    outputs, all_inputs, *kernel = layer.get_parameter("weight").shape
    basis, coefficients = torch.randn(count, inputs, *kernel), torch.randn(outputs, all_inputs // inputs, count)
    dense = layout(type(layer)(**arguments(layer)))
    x = torch.randn(shape).requires_grad_()
    if x.dim() == 4:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    ways = {
        way: layout(Composed(dense, {"weight": basis}, {"weight": coefficients}, way))  # type: ignore[arg-type]
        for way in ("compose", "mix")
    }
    found = shortest({w: partial(there_and_back, m, x) for w, m in {"dense": dense, **ways}.items()}, 5)
    row = {
        "model": model,
        "weight": name,
        "width": size.width,
        "shape": [outputs, all_inputs, *kernel],
        "input": list(shape),
        "r1": inputs,
        "r2": count,
        "multiply_adds": round(count / outputs + count / basis[0].numel(), 3),
        "dense_ms": round(found["dense"], 3),
        "compose": round(found["compose"] / found["dense"], 2),
        "mix": round(found["mix"] / found["dense"], 2),
        "rule": "mix" if mixing_pays(dense, basis, coefficients) else "compose",
    }
    print(json.dumps(row), flush=True)
    return row


def arguments(layer: nn.Module) -> dict[str, Any]:
    """What makes such a layer anew."""
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.in_features, "out_features": layer.out_features, "bias": False}
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding")
    return {name: getattr(layer, name) for name in names} | {"bias": False}


def there_and_back(module: nn.Module, x: Tensor) -> None:
    """One forward and backward pass."""
    x.grad = None
    module.zero_grad()
    output = module(x)
    output.backward(torch.ones_like(output))


def training_step(made: Experiment, size: Size, batch: Batch) -> Callable[[], None]:
    """One local training step at a size, optimizer included."""
    context, method = made.context, made.method
    message = method.extract(context, method.init(context), Client(0, 0, size, 1, BATCH, 0))
    module = built(context, method, message)
    module.train()
    optimizer = make_optimizer(context, method, module, 0.001)
    step = Step(0, torch.Generator(), {}, make_objective(context.task, context.tricks, None))

    def call() -> None:
        loss = method.loss(module, batch, step)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return call


def steps(model: str, times: int) -> Iterator[dict[str, Any]]:
    """One row per width: the step as clients run it, with every layer composed, and the dense one."""
    dense, auto, composed = (
        experiment(model, m) for m in (HeteroFL(scaler=False), FLANC(), FLANC(execution="compose"))
    )
    x = torch.rand(BATCH, *MODELS[model])
    batch = Batch(x.contiguous(memory_format=torch.channels_last), torch.arange(BATCH) % 10)
    for size in dense.sizes:
        made = {"dense": dense, "flanc": auto, "all_composed": composed}
        found = shortest({name: training_step(e, size, batch) for name, e in made.items()}, times)
        row = {
            "model": model,
            "width": size.width,
            "dense_ms": round(found["dense"], 2),
            "ratio": round(found["flanc"] / found["dense"], 3),
            "ratio_all_composed": round(found["all_composed"] / found["dense"], 3),
        }
        print(json.dumps(row), flush=True)
        yield row


def main() -> None:
    """Measures what is asked for, by default everything, and writes the file."""
    torch.set_num_threads(1)
    hold_memory()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = machine()
    asked = sys.argv[1:] or ["layers", "steps"]
    if "layers" in asked:
        results["layers"] = [row for model in MODELS for row in both_ways(model)]
    if "steps" in asked:
        repeats = {"small-cnn": 40, "flanc-cnn": 6, "resnet18": 4}
        results["steps"] = [row for model, times in repeats.items() for row in steps(model, times)]
        worst = max(results["steps"], key=lambda row: row["ratio"])
        print(f"worst: {worst['ratio']} times the dense step, {worst['model']} at width {worst['width']}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
