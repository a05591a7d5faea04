"""A method in one file: slices as in HeteroFL, but a wider network has more say where several hold an entry.

python examples/custom_method.py [--rounds 5] [--out runs/custom-method]

In an experiment file beside this one it is `[method] name = "custom_method:Trusting"`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

import anysize as az
from anysize.elastic.skeleton import fill
from anysize.methods import Client, Method, SubModel, Update
from anysize.methods.kit import checked, class_weights, cut, sub_model
from anysize.methods.mean import StreamingMean
from anysize.testing import check_method
from anysize.wire import Tensors


@dataclass(frozen=True)
class TrustingState:
    """The full network's tensors."""

    tensors: Tensors


@dataclass(frozen=True)
class Trusting(Method[TrustingState]):
    """Prefix slices; an update's weight is its samples times its width to the power of `exponent`."""

    exponent: float = 1.0

    summary = "prefix slices, wider clients weigh more"

    def sizes(self, context: az.Context) -> Sequence[az.Size]:
        return context.sizes

    def init(self, context: az.Context) -> TrustingState:
        return TrustingState(dict(context.start()))

    def extract(self, context: az.Context, state: TrustingState, client: Client) -> SubModel:
        width = client.size.width
        return sub_model(client, cut(context, state.tensors, width), width=width)

    def aggregate(self, context: az.Context, state: TrustingState, updates: Iterable[Update]) -> TrustingState:
        mean = StreamingMean(state.tensors, context.axes.head)
        for update in checked(context, updates):
            kept = context.axes.kept(update.width)
            index = {name: context.axes.index(name, kept) for name in update.tensors}
            weight = update.weight(context.tricks) * update.width**self.exponent
            mean.add(update.tensors, weight, index, class_weights(context, update))
        return TrustingState(mean.result())

    def customize(self, context: az.Context, state: TrustingState, size: az.Size) -> nn.Module:
        return fill(context.skeleton(size.width), cut(context, state.tensors, size.width))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/custom-method"))
    options = parser.parse_args()

    check_method(Trusting(exponent=2.0))
    print("Trusting keeps every law")

    experiment = az.Experiment(
        data="digits",
        clients=10,
        model={"name": "mlp", "options": {"hidden": [64, 32]}},
        method=Trusting(exponent=2.0),
        training={"learning_rate": 0.1, "batch_size": 16},
        rounds=options.rounds,
    )
    run = experiment.run(out=options.out, overwrite=True)
    for label, metrics in run.evaluate().items():
        print(f"width {label}: accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
