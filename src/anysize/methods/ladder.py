"""Ladder: every step trains the client's own width, and beside it a smaller one that learns from its answers.

A method of this project. In HeteroFL a small width learns only as a part of larger networks, unless clients have that
width themselves. In FjORD and SHeteroFL large clients train it too, but a large width then has fewer steps of its own
(FjORD draws one width a batch), or every step costs the sum of all widths (SHeteroFL). Here every step trains the
client's own width, and besides it one smaller width, drawn anew for every batch. That one is taught by the labels and
by the answers of the larger network, which are of the same batch and come for free. The mean of every entry over the
clients that hold it is HeteroFL's.

    symbol          here                            shape
    w               state.tensors                   full network
    p               client.size.width               scalar
    q               the width drawn, below p        scalar
    t               teaching                        scalar
    f_p, f_q        module.network, module.at(i)    the first ceil(p n) channels of every width group

The loss of a step is L(f_p, y) + (1 - t) L(f_q, y) + t D(f_q, f_p), where D is the task's distillation and sends no
gradient to f_p. A client of the smallest width has the first term alone. With widths 0.25, 0.5, 0.75 and 1.0 a step of
the largest costs 1.3 times HeteroFL's in multiply-adds, since costs fall with the square of the width.

Where statistics of batch-norm are tracked, every width has its own.

Related work: in-place distillation and the drawn width come from universally slimmable networks (Yu and Huang 2019),
the sub-models from HeteroFL (Diao et al. 2021), distillation in a client from FjORD (Horváth et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

import anysize.methods.nesting as nesting
from anysize.config.values import UpToOne
from anysize.elastic.views import Nested, statistics_names
from anysize.methods.base import Method
from anysize.methods.capabilities import Parted
from anysize.methods.context import Context
from anysize.methods.kit import check_width, loss_and_answers, nested_parts
from anysize.methods.messages import Client, SubModel, Update
from anysize.methods.size import Size
from anysize.methods.training import Batch, Step, Tricks
from anysize.wire import Tensors


@dataclass(frozen=True)
class LadderState:
    """The full network's tensors, and each trained width's batch-norm statistics."""

    tensors: Tensors
    statistics: dict[str, Tensors]


class Said(nn.Module):
    """Gives outputs of a pass that is done, so that a second loss of them costs no second pass."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._output


@dataclass(frozen=True)
class Ladder(Method[LadderState], Parted):
    """Nested widths: in every step the client's own, and a smaller one that it teaches.

    Attributes:
        teaching: how much of the smaller width's loss is against the larger one's answers; the rest is against the
            labels.
    """

    teaching: UpToOne = 0.5

    summary = "nested widths: a client's own in every step, and a smaller one that learns from its answers"
    paper = Tricks(masked_loss=True, classwise_head=True, batch_norm="calibrated")

    def sizes(self, context: Context) -> Sequence[Size]:
        return context.sizes

    def init(self, context: Context) -> LadderState:
        return LadderState(*nesting.start(context, statistics_names(context.template)))

    def extract(self, context: Context, state: LadderState, client: Client) -> SubModel:
        return nesting.message(context, state.tensors, state.statistics, client)

    def build(self, context: Context, sub_model: SubModel) -> nn.Module:
        return nesting.network(context, sub_model, statistics_names(context.template))[0]

    def loss(self, module: nn.Module, batch: Batch, step: Step) -> Tensor:
        """The own width's loss, and that of a smaller one against the labels and the own one's answers."""
        assert isinstance(module, Nested)
        if len(module) == 1:
            return step.objective(module.network, batch)
        loss, answers = loss_and_answers(module.network, batch, step)
        by_labels, said = loss_and_answers(module.at(step.choose(len(module) - 1)), batch, step)
        assert step.distillation is not None
        by_teacher = step.distillation(Said(said), batch, answers)
        return loss + (1 - self.teaching) * by_labels + self.teaching * by_teacher

    def aggregate(self, context: Context, state: LadderState, updates: Iterable[Update]) -> LadderState:
        """The mean of every entry over the clients that hold it; of statistics, over those that trained the width."""
        return LadderState(*nesting.averaged(context, state.tensors, state.statistics, updates, "ladder"))

    def customize(self, context: Context, state: LadderState, size: Size) -> nn.Module:
        check_width(context, size.width, "ladder")
        return nesting.finished(context, state.tensors, state.statistics, size.width)

    def parts(self, context: Context) -> Mapping[str, int]:
        return nested_parts(context)
