"""Who can estimate the batch-norm statistics of a finished network, with what, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from anysize.client.work import CALIBRATION_PASSES, needs_calibration
from anysize.elastic.axes import Kept
from anysize.elastic.norm import Statistics, batch_norms, collect, put_together
from anysize.experiment.experiment import Experiment
from anysize.methods.base import Method
from anysize.methods.capabilities import Mixture, Pieced
from anysize.methods.context import Context
from anysize.methods.messages import Client, SubModel
from anysize.methods.size import Size
from anysize.wire import Json, size_bytes


@dataclass(frozen=True)
class Job:
    """Something that clients run to estimate statistics.

    Attributes:
        label: of what the statistics are: a size, a member of a mixture, or a piece of a size.
        whole: the label of the size or member that needs them.
        size: what a device must hold to run it.
        extract: what a client receives.
        kept: of a piece, its channels.
        anybody: in a simulation any client may run it, if none can.
        server: the server runs it on its own samples, and no client does.
    """

    label: str
    whole: str
    size: Size
    extract: Callable[[Client], SubModel]
    kept: Kept | None = None
    anybody: bool = False
    server: bool = False


def jobs(
    context: Context,
    method: Method[Any],
    state: Any,
    sizes: Sequence[Size],
    devices: Collection[Size],
    proxy: bool = False,
) -> list[Job]:
    """What is run to calibrate these sizes, the largest, the longest work, first.

    Members of a mixture are all of the smallest size. Any other size is run whole, by clients if one of the `devices`
    holds it, else by the server if it has samples (`proxy`); else in pieces by clients, if the method has such; else
    not at all: it goes on normalising by its batch.
    """
    if isinstance(method, Mixture):
        names = dict.fromkeys(name for size in sizes for name in method.members(context, state, size))
        member = partial(partial, method.member, context, state)
        return [Job(name, name, context.sizes[0], member(name)) for name in names]
    return [job for size in reversed(sizes) for job in _jobs_of(context, method, state, size, devices, proxy)]


def _jobs_of(
    context: Context, method: Method[Any], state: Any, size: Size, devices: Collection[Size], proxy: bool
) -> list[Job]:
    held, extract = any(device.holds(size) for device in devices), partial(method.extract, context, state)
    if held or method.needs_simulation:
        return [Job(size.label, size.label, size, extract, anybody=not held)]
    if proxy:
        return [Job(size.label, size.label, size, extract, server=True)]
    if not isinstance(method, Pieced) or not all(norm.affine for norm in batch_norms(context.template)):
        return []  # a batch-norm without weights has no tensor that says which channels a piece has
    return [
        Job(f"{size.label}/{number}", size.label, piece.size, piece.extract, piece.kept)
        for number, piece in enumerate(method.pieces(context, state, size))
    ]


def whole(context: Context, todo: Sequence[Job], found: dict[str, Statistics]) -> dict[str, Statistics]:
    """The statistics by size or member: as they are, or put together from all pieces of a size."""
    complete = {job.label: found[job.label] for job in todo if job.kept is None and job.label in found}
    for label in dict.fromkeys(job.whole for job in todo if job.kept is not None):
        pieces = [job for job in todo if job.whole == label]
        if all(piece.label in found for piece in pieces):
            parts = [
                [(found[p.label], places(context, p.kept)) for p in pieces if p.kept is not None and p.size == size]
                for size in sorted({piece.size for piece in pieces}, key=lambda size: size.order, reverse=True)
            ]
            complete[label] = put_together(parts, [norm.num_features for norm in batch_norms(context.template)])
    return complete


def places(context: Context, kept: Kept) -> list[Tensor | None]:
    """For each batch-norm of the full network, which of its channels are kept."""
    norms = batch_norms(context.template)
    names = [name for name, layer in context.template.named_modules() if any(layer is norm for norm in norms)]
    return [context.axes.index(f"{name}.weight", kept)[0] for name in names]


def estimates(experiment: Experiment, state: Any) -> list[Json]:
    """For every size, how its statistics are found at an evaluation, and what travels to and from each asked client."""
    context, method = experiment.context, experiment.method
    if not needs_calibration(context):
        return []
    sizes = list(method.sizes(context))
    proxy = experiment.config.evaluation.calibration_proxy is not None
    todo = jobs(context, method, state, sizes, experiment.size_of_group.values(), proxy)
    of_size = {size.label: [job for job in todo if job.whole == size.label] for size in sizes}
    if isinstance(method, Mixture):
        of_size = {"each member": todo[:1]}
    return [{"size": label, "by": _by(own)} | _traffic(context, method, own) for label, own in of_size.items()]


def _by(own: Sequence[Job]) -> str:
    if not own:
        return "batch"
    if own[0].server:
        return "server"
    return "clients" if own[0].kept is None else "pieces"


def _traffic(context: Context, method: Method[Any], own: Sequence[Job]) -> Json:
    """The messages to one client in all passes, and its answers; a second pass has the first one's statistics."""
    down = up = 0
    for job in [job for job in own if not job.server]:
        message = job.extract(Client(0, 0, job.size, 1, 0, context.seed, "calibrate"))
        answer, note = collect(method.build(context, message), []).tensors(), message.ticket.to_json()
        first, later = size_bytes(message.tensors, note), size_bytes({**message.tensors, **answer}, note)
        down += first + (CALIBRATION_PASSES - 1) * later
        up += CALIBRATION_PASSES * size_bytes(answer, note)
    return {"pieces": len(own), "bytes_down": down, "bytes_up": up}
