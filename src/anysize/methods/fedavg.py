"""FedAvg: every client trains the same network, and the server takes the mean weighted by samples.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. "Communication-Efficient Learning of Deep Networks from Decentralized
Data". AISTATS 2017.

In a fleet of unequal devices there are two ways to use it, both baselines of the methods here: give every client the
network that the weakest device can train, or pretend that every device can train every width and train one network per
width (an upper bound that no real fleet reaches).

Equation index: Algorithm 1, w_{t+1} = sum_k (n_k / n) w_k -> `FedAvg.aggregate`.

Departures: none. Running statistics of batch-norm are averaged with the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from anysize.elastic.ensemble import Networks
from anysize.elastic.skeleton import fill
from anysize.errors import MethodError
from anysize.methods.base import Method
from anysize.methods.capabilities import Parted
from anysize.methods.context import Context
from anysize.methods.kit import checked, class_weights, first_tensors, sound, sub_model, trained_parameters, width_key
from anysize.methods.messages import Client, ParameterGroup, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step
from anysize.wire import Tensors, under


@dataclass(frozen=True)
class FedAvgState:
    """The tensors of one network per trained width, keyed by width."""

    networks: dict[str, Tensors]


@dataclass(frozen=True)
class FedAvg(Method[FedAvgState], Parted):
    """One network for all, averaged.

    Attributes:
        width: "weakest": every client trains the smallest size of the fleet; "each": every client trains one network of
            every size, whatever its capacity.
    """

    width: Literal["weakest", "each"] = "weakest"

    summary = "one network for all: at the weakest device's width, or one per width as an upper bound"

    @property
    def needs_simulation(self) -> bool:
        return self.width == "each"

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes[:1] if self.width == "weakest" else context.sizes

    def init(self, context: Context) -> FedAvgState:
        return FedAvgState({width_key(size.width): first_tensors(context, size.width) for size in self.sizes(context)})

    def extract(self, context: Context, state: FedAvgState, client: Client) -> SubModel:
        sent = dict(enumerate(self._widths(context)))
        if client.job != "train":  # other jobs concern one network, not all
            asked = next((i for i, width in sent.items() if width == client.size.width), 0)
            sent = {asked: sent[asked]}
        networks = {i: state.networks[width_key(width)] for i, width in sent.items()}
        tensors = {f"{i}.{name}": tensor for i, network in networks.items() for name, tensor in network.items()}
        return sub_model(client, tensors, width=max(sent.values()), parts=[f"{width:g}" for width in sent.values()])

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        numbers = sorted({int(name.partition(".")[0]) for name in sub_model.tensors})
        widths = self._widths(context)
        return fill(Networks({str(i): context.skeleton(widths[i]) for i in numbers}), sub_model.tensors)

    def groups(self, module: nn.Module) -> list[ParameterGroup]:
        """One parameter group per network, since networks share nothing, not even the norm for clipping gradients."""
        networks = [[p for p in network.parameters() if p.requires_grad] for network in module.children()]
        return [ParameterGroup(parameters) for parameters in networks if parameters]

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        assert isinstance(module, Networks)
        losses = [step.objective(network, batch) for network in module.values()]
        return sum(losses[1:], start=losses[0])

    def aggregate(self, context: Context, state: FedAvgState, updates: Iterable[Update]) -> FedAvgState:
        means = [
            context.average(state.networks[width_key(width)], context.axes.head) for width in self._widths(context)
        ]
        for update in checked(context, updates, numbers=False):
            weight, classes = update.weight(context.tricks), class_weights(context, update)
            for i, mean in enumerate(means):
                mean.add(under(f"{i}.", update.tensors), weight, classes=classes, look=sound(update))
        return FedAvgState({width_key(width): mean.result() for width, mean in zip(self._widths(context), means)})

    def customize(self, context: Context, state: FedAvgState, size: Size) -> nn.Module:
        tensors = state.networks.get(width_key(size.width))
        if tensors is None:
            trained = ", ".join(sorted(state.networks))
            raise MethodError(f"fedavg has no network of width {size.width:g}; it trained {trained}")
        return fill(context.skeleton(size.width), tensors)

    def parts(self, context: Context) -> Mapping[str, int]:
        return {f"{width:g}": trained_parameters(context.skeleton(width)) for width in self._widths(context)}

    def _widths(self, context: Context) -> list[float]:
        """The distinct widths of the trained networks, smallest first."""
        return sorted({size.width for size in self.sizes(context)})
