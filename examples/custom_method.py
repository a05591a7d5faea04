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
from anysize import methods as m
from anysize.testing import check_method


@dataclass(frozen=True)
class TrustingState:
    """The full network's tensors."""

    tensors: m.Tensors


@dataclass(frozen=True)
class Trusting(m.Method[TrustingState]):
    """Prefix slices; an update's weight is its samples times its width to the power of `exponent`."""

    exponent: float = 1.0

    summary = "prefix slices, wider clients weigh more"

    def sizes(self, context: m.Context) -> Sequence[m.Size]:
        return context.sizes

    def init(self, context: m.Context) -> TrustingState:
        return TrustingState(dict(context.start()))

    def extract(self, context: m.Context, state: TrustingState, client: m.Client) -> m.SubModel:
        width = client.size.width
        return m.sub_model(client, m.cut(context, state.tensors, width), width=width)

    def aggregate(self, context: m.Context, state: TrustingState, updates: Iterable[m.Update]) -> TrustingState:
        mean = context.average(state.tensors, context.axes.head)
        for update in m.checked(context, updates):
            kept = context.axes.kept(update.width)
            index = {name: context.axes.index(name, kept) for name in update.tensors}
            weight = update.weight(context.tricks) * update.width**self.exponent
            mean.add(update.tensors, weight, index, m.class_weights(context, update))
        return TrustingState(mean.result())

    def customize(self, context: m.Context, state: TrustingState, size: m.Size) -> nn.Module:
        return m.fill(context.skeleton(size.width), m.cut(context, state.tensors, size.width))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/custom-method"))
    options = parser.parse_args()
    method = Trusting(exponent=2.0)
    check_method(method)
    print("Trusting keeps every law")
    experiment = az.Experiment(data="digits", clients=10, model="mlp", method=method, rounds=options.rounds)
    print(experiment.run(out=options.out, overwrite=True).evaluate())
