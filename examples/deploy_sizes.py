"""From a run directory to files for devices: by size or by budget, as weights or as ONNX, run without this package.

python examples/deploy_sizes.py [RUN] [--to FOLDER] [--rounds 5]

Without a run it trains a small one first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime

import anysize as az


def train(out: Path, rounds: int) -> None:
    """A short run to deploy from."""
    model = {"name": "small-cnn", "options": {"channels": [16, 32, 32]}}
    training = {"learning_rate": 0.05, "batch_size": 16}
    experiment = az.Experiment(
        data="digits", clients=10, model=model, method="heterofl", training=training, rounds=rounds
    )
    experiment.run(out=out, overwrite=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--to", type=Path, default=Path("runs/deployed"))
    parser.add_argument("--rounds", type=int, default=5, help="of the run that is trained where none is given")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    directory = options.run or options.to / "run"
    if options.run is None:
        train(directory, options.rounds)

    run = az.load(directory)
    signature = run.experiment.signature
    for size in run.sizes:
        print(f"size {size.label}: {run.cost(size).inference_bytes:,} bytes")

    # By size: a trained label, or any width that the method can be cut to.
    smallest = run.sizes[0]
    done = az.export(run.customize(smallest.label), options.to / "smallest.safetensors", signature)
    print(f"{done.path}: {done.size_bytes:,} bytes, within {done.difference:.1g} of PyTorch")

    # By budget: the largest trained size whose weights fit.
    budget = az.Budget(inference_bytes=run.cost(run.sizes[-1]).inference_bytes - 1)
    fitting = run.fitting(budget)
    done = az.export(run.customize(budget=budget), options.to / "fitting.onnx", signature)
    print(f"{done.path}: size {fitting.label} is the largest that fits")

    # On the device: no PyTorch, no anysize. Inputs are raw values in [0, 1].
    session = onnxruntime.InferenceSession(done.path)
    image = np.random.default_rng(0).random((1, *signature.input_shape), dtype=np.float32)
    (logits,) = session.run(None, {"input": image})
    print(f"an answer: class {int(logits.argmax())}")


if __name__ == "__main__":
    main()
