"""A run in its directory, finished or not: its history, and networks of any size cut from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from anysize.client.batches import batches, draw
from anysize.client.metrics import measure
from anysize.client.process import hold_memory, one_thread
from anysize.client.shards import finished, statistics_of
from anysize.client.work import needs_calibration
from anysize.config import extras
from anysize.cost.budgets import best, needs
from anysize.cost.count import Cost, finished_cost
from anysize.devices.budget import Budget
from anysize.elastic.norm import Statistics, batch_norms
from anysize.engines.inprocess import InProcess
from anysize.errors import AnysizeError, CheckpointError, ConfigError, DataError, ModelError, TrustError, unknown
from anysize.experiment.brief import known_in
from anysize.experiment.estimating import jobs
from anysize.experiment.experiment import Experiment, evaluation_part
from anysize.experiment.signature import Known
from anysize.exports.adapter import write_adapter
from anysize.exports.bundle import write_bundle
from anysize.exports.formats import Exported, sample_inputs
from anysize.exports.onnx_bundle import write_onnx_bundle
from anysize.exports.packing import Entry, Extras, Judge, Precision
from anysize.inputs import Input
from anysize.methods.capabilities import Factored, Mixture, OnBase, levels_of, offered_sizes
from anysize.methods.size import Levels, Size
from anysize.models import plain, vocabulary
from anysize.models.pretrained import refitted
from anysize.records import checkpoint as checkpoints
from anysize.records.directory import saved_config
from anysize.records.events import by_round_and_size, history
from anysize.report import notebook
from anysize.report import write as write_report
from anysize.rng import generator
from anysize.server.calibration import calibrate, proxy_inputs, untrained
from anysize.server.judging import check_attackable, on_test, under_attack
from anysize.wire import Json

if TYPE_CHECKING:
    import pandas


def load(directory: str | Path, *, best: bool = False, **live: Any) -> Run:
    """The run in a directory, finished or not.

    Args:
        directory: the run directory.
        best: take the state after the best round, which `callbacks.keep_best` keeps, not that after the last.
        **live: `model=`, `data=`, `task=` or `method=`, if the run was made with objects that a file cannot name.
    """
    if not isinstance(directory, str | PathLike):
        raise CheckpointError(f"load({directory!r}): give the path of a run directory")
    return Run(Path(directory), None, best, **live)


class Run:
    """A run in its directory: its history, and networks of any size cut from it.

    Attributes:
        directory: the run directory.
        config: the complete config in the directory.
        experiment: the experiment of the run.
    """

    def __init__(self, directory: Path, experiment: Experiment | None = None, best: bool = False, **live: Any) -> None:
        self.directory = directory
        file = checkpoints.BEST if best else checkpoints.FILE
        about = checkpoints.peek(directory, file)
        self.config = saved_config(directory)
        self.experiment = experiment or Experiment.from_config(self.config, _known(directory, about), **live)
        fresh = self.experiment.method.init(self.experiment.context)
        self._checkpoint = checkpoints.restore_from(directory, fresh, file)

    @property
    def round(self) -> int:
        """The round whose state this is: the last finished one, or the best."""
        return self._checkpoint.round

    @property
    def state(self) -> Any:
        """The method's state."""
        return self._checkpoint.state

    @property
    def history(self) -> list[Json]:
        """The round events, one for each round."""
        return history(self.directory)

    def __repr__(self) -> str:
        return notebook.as_text(self.directory, self.round)

    def _repr_html_(self) -> str:
        return notebook.as_html(self.directory, self.round)

    def frame(self) -> pandas.DataFrame:
        """The numbers of every round as a pandas DataFrame, a row for each round and size.

        Its columns are round, size, the metrics on the test set, held_out (the metric on the clients' held-out data, if
        they were asked), and what the whole round had: train_loss, bytes_down, bytes_up, seconds. NaN: not measured.

        Raises:
            AnysizeError: pandas is not installed.
        """
        if (missing := extras.needs("run.frame()", "notebook", "pandas")) is not None:
            raise AnysizeError(missing)
        import pandas

        return pandas.DataFrame(by_round_and_size(self.directory))

    def plot(self) -> notebook.Plot:
        """A figure of the metric of every size over the rounds; a notebook shows it, and `save` writes it as SVG."""
        return notebook.plot(self.directory)

    def report(self) -> Path:
        """The path of the run's report.html, newly written."""
        return write_report(self.directory)

    @property
    def sizes(self) -> list[Size]:
        """The sizes that were trained."""
        return list(self.experiment.method.sizes(self.experiment.context))

    @property
    def offered(self) -> list[Size]:
        """The sizes that `bundle` and a budget choose from: those that were trained, and every number of bases."""
        return list(offered_sizes(self.experiment.method, self.experiment.context))

    def size(self, given: float | str) -> Size:
        """The size with this label or width, trained or not."""
        labels = {size.label: size for size in self.offered}
        text = given if isinstance(given, str) else repr(float(given))
        if text in labels:
            return labels[text]
        try:
            width = float(text)
        except ValueError:
            raise ConfigError(unknown("size", text, labels) + ", or any width up to the largest") from None
        if not 0 < width <= 1:
            raise ConfigError(f"size {text}: a width must be above 0 and at most 1; trained: {', '.join(labels)}")
        return next((size for size in self.offered if size.width == width), Size(width))

    @property
    def levels(self) -> Levels | None:
        """The levels of robustness that a customised network can have; None if the method offers no choice."""
        return levels_of(self.experiment.method, self.experiment.context)

    def customize(
        self, size: float | str | None = None, budget: Budget | None = None, robustness: float | None = None
    ) -> nn.Module:
        """An ordinary network in evaluation mode, with fixed batch-norm statistics.

        Args:
            size: a label or a width; by default the largest.
            budget: instead of a size: the largest one offered that fits it.
            robustness: between 0 (accurate) and 1 (robust), if the method offers a choice.
        """
        if size is not None and budget is not None:
            raise ConfigError("give a size or a budget, not both")
        chosen = self.sizes[-1] if size is None else self.size(size)
        if budget is not None:
            chosen = self.fitting(budget)
        chosen = self._robust(chosen, robustness)
        network = plain(self._cut(chosen))
        # Where no configuration of its kind describes it, the network answers all the same.
        with suppress(ModelError):
            network = refitted(network, sample_inputs(self.experiment.signature, 2, vocabulary(network)))
        return network

    def _cut(self, size: Size) -> nn.Module:
        """The finished network of a size, as a module of one input."""
        with one_thread():
            known = self._statistics([size])
            return finished(self.experiment.context, self.experiment.method, self.state, size, known)

    def bundle(
        self,
        path: str | Path,
        sizes: Sequence[float | str] | None = None,
        *,
        runtime: Literal["torch", "onnx"] = "torch",
        precision: Precision = "float32",
        latency: bool = False,
        key: str | Path | None = None,
    ) -> Exported:
        """Write several sizes, by default all that are offered, to one file for devices.

        The file states what every size costs and, if the data has a test part, its metrics there.

        Args:
            path: a path that ends in .anysize.
            sizes: labels or widths.
            runtime: what reads the file: "torch" for `anysize.runtime`, "onnx" for `anysize.onnx_runtime`.
            precision: in which the file stores large weights; below float32 it also states the metrics of float32.
            latency: whether the file states how long every size takes on this machine.
            key: a file with the private key (ed25519, PEM) that signs the bundle.
        """
        example = self.experiment.signature.example(1)
        context, method, levels = self.experiment.context, self.experiment.method, self.levels
        chosen = self.offered if sizes is None else [self.size(size) for size in sizes]
        values: Sequence[float | None] = [None] if levels is None else levels.values
        extras = Extras(self._judge(), latency, precision, None if key is None else Path(key))
        entries = [
            Entry(
                label=size.label,
                width=size.width,
                networks={value: self._cut(self._robust(size, value)) for value in values},
                mixes=levels is not None and levels.mixes,
                products=method.products(context, self.state, size) if isinstance(method, Factored) else {},
            )
            for size in sorted(chosen, key=lambda size: size.order)
        ]
        entries = [replace(one, costs=finished_cost(next(iter(one.networks.values())), example)) for one in entries]
        about = {"run": self.config.name, "method": self.config.method.name, "round": self.round}
        about |= {"metric": self.experiment.task.metric}
        write = write_bundle if runtime == "torch" else write_onnx_bundle
        with one_thread():
            return write(entries, path, self.experiment.signature, context.axes, about, extras)

    @property
    def has_adapters(self) -> bool:
        """Whether what was learned is adapters beside a frozen network."""
        return isinstance(self.experiment.method, OnBase)

    def adapter(self, folder: str | Path, size: float | str | None = None) -> Exported:
        """Write what was learned beside a frozen network as a folder that peft opens.

        Args:
            folder: must not exist yet, or be empty.
            size: a label or a width; by default the largest.

        Raises:
            ConfigError: the method trains no adapters, or batch-norm statistics would be missing from them.
        """
        context, method = self.experiment.context, self.experiment.method
        if not isinstance(method, OnBase):
            raise ConfigError(
                f"{folder}: an adapter is written for method lora alone, and this run's is {self.config.method.name}; "
                "for another format give a name that ends in .onnx, .pt2, .pte or .safetensors"
            )
        if needs_calibration(context):
            raise ConfigError(
                f'{folder}: tricks.batch_norm = "{context.tricks.batch_norm}" gives the network statistics that no '
                "adapter holds; write the merged network, as .safetensors"
            )
        chosen = self.sizes[-1] if size is None else self.size(size)
        with one_thread():
            made = method.adapter(context, self.state, chosen)
            return write_adapter(made, Path(folder), self.experiment.signature)

    def _judge(self) -> Judge | None:
        """Measures a network's metrics on the test part; None if the data has none here."""
        context, batch = self.experiment.context, self.config.evaluation.batch_size
        try:
            part = evaluation_part(self.experiment)
        except DataError:
            return None
        return lambda network: context.task.metrics(measure(context, _Called(network), part, batch))

    def fitting(self, budget: Budget) -> Size:
        """The largest offered size that fits a budget."""
        largest_first = sorted(self.offered, key=lambda size: size.order, reverse=True)
        size = best(largest_first, budget, lambda size: self.cost(size).units())
        if size is None:
            smallest = largest_first[-1]
            least = needs(budget, self.cost(smallest).units())
            raise ConfigError(f"no trained size fits the budget; the smallest, {smallest.label}, needs {least}")
        return size

    def cost(self, size: Size) -> Cost:
        """What a size costs."""
        return self.experiment.cost(size, state=self.state)

    def evaluate(
        self, sizes: Sequence[float | str] | float | str | None = None, robustness: float | None = None
    ) -> dict[str, dict[str, float]]:
        """The metrics of the customised networks on the test set, by size label; any sizes, trained or not."""
        test, batch = evaluation_part(self.experiment), self.config.evaluation.batch_size
        wanted = self._wanted(sizes, robustness)
        context, method = self.experiment.context, self.experiment.method
        hold_memory()
        with one_thread():
            apart = self.config.evaluation.by_domain
            return on_test(context, method, self.state, test, self._statistics(wanted), batch, wanted, apart)

    def attack(
        self,
        sizes: Sequence[float | str] | float | str | None = None,
        robustness: float | None = None,
        kind: Literal["pgd", "auto"] | None = None,
    ) -> dict[str, list[Json]]:
        """The metric per size label and level of robustness, on clean test samples and on the same under attack.

        Args:
            sizes: one or several labels or widths; by default those that were trained.
            robustness: one level; by default those that the experiment names.
            kind: the kind of attack; by default the experiment's, or "pgd" if it has none.
        """
        test, options = evaluation_part(self.experiment), self.config.evaluation
        chosen = kind or (options.attack if options.attack != "none" else "pgd")
        wanted = self._wanted(sizes, robustness)
        context, method = self.experiment.context, self.experiment.method
        check_attackable(self.experiment)
        with one_thread():
            statistics = self._statistics(wanted)
            strength = options.model_copy(update={"attack": chosen})
            return under_attack(context, method, self.state, test, statistics, strength, wanted)

    def _wanted(self, sizes: Sequence[float | str] | float | str | None, robustness: float | None) -> list[Size]:
        if isinstance(sizes, float | str):
            sizes = [sizes]
        chosen = self.sizes if sizes is None else [self.size(size) for size in sizes]
        return [self._robust(size, robustness) for size in chosen]

    def _robust(self, size: Size, robustness: float | None) -> Size:
        """The size at a level of robustness; an error if the method does not offer that level."""
        if robustness is None:
            return size
        levels = self.levels
        if levels is None:
            raise ConfigError(
                f"robustness {robustness:g}: {self.config.method.name} offers no choice of robustness in this run"
            )
        if not levels.allows(robustness):
            raise ConfigError(f"robustness {robustness:g}: allowed: {levels}")
        return replace(size, robustness=float(robustness))

    def _statistics(self, sizes: Sequence[Size]) -> dict[str, Statistics]:
        """Batch-norm statistics of these sizes: from the checkpoint, or else estimated now."""
        context, method, known = self.experiment.context, self.experiment.method, self._checkpoint.statistics
        if self.levels is not None or not batch_norms(context.template):  # networks hold their own, or need none
            return {}
        missing = [size for size in sizes if statistics_of(context, method, self.state, size, known) is None]
        trained = {size.label for size in self.sizes}
        # All members of a mixture were trained, whichever sizes were: their statistics are known, or can be calibrated.
        new = [size for size in missing if size.label not in trained and not isinstance(method, Mixture)]
        old = [size for size in missing if size not in new]
        if old and needs_calibration(context):
            known = known | self._calibrated(old)
        return known | {size.label: self._untrained(size) for size in new}

    def _calibrated(self, sizes: Sequence[Size]) -> dict[str, Statistics]:
        """Statistics of sizes, estimated now on the clients' data; an error if only devices have it."""
        experiment = self.experiment
        context, method, devices = experiment.context, experiment.method, experiment.size_of_group.values()
        proxy = experiment.config.evaluation.calibration_proxy is not None
        todo = jobs(context, method, self.state, sizes, devices, proxy)
        if not todo:  # they normalise by their batch, as `plan` says
            return {}
        if experiment.config.own_data and not all(job.server for job in todo):
            raise DataError(
                f"size {', '.join(size.label for size in sizes)} has no batch-norm statistics: the data is on the "
                "devices, and none that can run it has answered. Evaluations estimate them: continue with resume=True"
            )
        engine = InProcess(experiment.context, experiment.method, experiment.shares, self._checkpoint.kept)
        return calibrate(experiment, self.state, engine, experiment.fleet, self.round, sizes)

    def _untrained(self, size: Size) -> Statistics:
        """Statistics of a size that was never trained: no client has tracked any, whatever tricks.batch_norm is."""
        experiment = self.experiment
        inputs = proxy_inputs(experiment) or self._inputs_of_clients()
        return untrained(experiment.context, experiment.method, self.state, size, inputs)

    def _inputs_of_clients(self) -> list[Tensor]:
        """Batches of the training samples of some clients, all of which are here."""
        experiment, count = self.experiment, self.config.evaluation.calibration_clients
        shares, batch = experiment.shares, self.config.training.batch_size
        random = generator(self.config.seed, self.round, "untrained")
        order, fleet = torch.randperm(len(shares), generator=random).tolist(), experiment.fleet
        chosen = [client for client in order if not fleet.sits_out(client, self.round)][:count]
        parts = [shares.share(client).train for client in chosen]
        most = self.config.evaluation.calibration_samples
        orders = [torch.randperm(len(part), generator=random)[:most] for part in parts]
        return [draw(part, index).x for part, order in zip(parts, orders) for index in batches(order, batch)]


class _Called(nn.Module):
    """A function of inputs, as a module."""

    def __init__(self, function: Callable[[Input], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Input) -> Tensor:
        """What the function returns."""
        return self._function(x)


def _known(directory: Path, about: Json) -> Known:
    """What a checkpoint knows of the data and of the sizes that the fleet trained."""
    try:
        return known_in(about)
    except TrustError as error:
        raise CheckpointError(f"the checkpoint in {directory} is damaged: {error}") from None
