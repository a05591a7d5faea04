"""An experiment: its parts, and the sizes that its devices train."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anysize.config.tables import ExperimentConfig
from anysize.cost.count import Cost, measure
from anysize.data import Part, stand_in
from anysize.devices.fleet import Fleet
from anysize.devices.groups import DeviceGroup
from anysize.elastic.norm import batch_norms
from anysize.elastic.skeleton import hollow
from anysize.elastic.tracing.forward import without_data
from anysize.errors import ConfigError, DataError, ModelError
from anysize.experiment.lookup import prepared
from anysize.experiment.setup import Setup
from anysize.experiment.sizes import Solved, solve_sizes
from anysize.methods import Method
from anysize.methods.averaging import BOUNDED, STREAMED
from anysize.methods.context import Context
from anysize.methods.size import Size
from anysize.methods.table import Table
from anysize.tasks import Sums


class Experiment(Setup):
    """An experiment with live objects or names in any place.

    >>> experiment = Experiment(data="digits", clients=20, model="mlp", method="fedavg", rounds=2)
    >>> [size.label for size in experiment.sizes]
    ['0.25', '0.5', '0.75', '1.0']

    Attributes:
        tabulates: whether a method computes its look-up table; without one it answers what it can.
    """

    tabulates = True

    def notices(self) -> list[str]:
        """Notices for the user before the first round."""
        found = [
            f'{who} sits out (devices.infeasible = "skip"): {why}'
            for who, why in self.described.explained(self.solved.idle)
        ]
        found += self.method.notices(self.context)
        if self.context.tricks.batch_norm == "local" and batch_norms(self.context.template):
            found.append(
                'batch_norm = "local": norm layers never leave the clients, so a customised network and the test on '
                'the server have them as at the start; judge with evaluation.on = ["clients"]'
            )
        if not self.config.tells("samples"):
            found.append(
                "devices do not tell how many samples they have, so all devices count equally; allow it with "
                'devices.share = ["samples"]'
            )
        return found + self._trusts()

    def _trusts(self) -> list[str]:
        """What the rule of aggregation does with what clients say, and who attacks."""
        rule, weighting = self.config.aggregation.rule, self.context.tricks.weighting
        found = []
        if rule in BOUNDED and weighting == "samples":
            found.append(
                f'aggregation.rule = "{rule}" bounds how far an update moves, not its weight: a client that claims '
                'many samples counts as many; tricks.weighting = "clients" counts each once'
            )
        if rule == "norm-filter" and self.config.training.local_steps is None:
            found.append(
                'aggregation.rule = "norm-filter" takes it that all clients train about the same number of steps: with '
                "training.local_epochs a client with many samples moves further, and may be left out; "
                "training.local_steps makes them equal"
            )
        if rule not in STREAMED and weighting == "samples":
            found.append(
                f'aggregation.rule = "{rule}" counts every client once: tricks.weighting = "samples" is not used'
            )
        if self.config.privacy.clip is not None:
            found.append("privacy.clip: draws and noise follow from the seed, with which the noise can be subtracted")
        if self.attackers:
            found.append(f'{len(self.attackers)} of {len(self.shares)} clients attack: "{self.config.adversary.name}"')
        return found

    def without_data(self) -> Experiment:
        """The experiment to plan with: its data set, if that is named and not on this machine, is stood in for.

        Nothing is then downloaded, and no table is made, since that takes real data.
        """
        made = "source" in self.__dict__ or self._known is not None or self.is_live("data") or self.config.own_data
        blank = None if made else stand_in(self.config.data.name, self.config.data.options)
        if blank is None:
            return self
        other = self.anew(self.config)
        other.__dict__["source"] = blank
        other.tabulates = False
        return other

    def check_options(self) -> None:
        """Refuses options of the method that would change nothing."""
        problems = [f"method: {problem}; leave out one of them" for problem in self.method.ignored()]
        if problems:
            raise ConfigError("\n".join(problems))

    def with_config(self, config: ExperimentConfig) -> Experiment:
        """The experiment of a config that differs only in its method; it shares what was computed from the data."""
        other = self.anew(config)
        other.tabulates = self.tabulates
        other._live.pop("method", None)
        shared = (
            "task",
            "source",
            "tested",
            "shares",
            "described",
            "signature",
            "model",
            "stages",
            "_traced",
            "_narrowed",
        )
        other.__dict__.update({key: self.__dict__[key] for key in shared if key in self.__dict__})
        return other

    def beside(self, config: ExperimentConfig, method: Method[Any] | None = None) -> Experiment:
        """The experiment of another config with the same live objects but the method, which may be given.

        A data set that both name is not loaded again.
        """
        other = self.anew(config)
        other._live.pop("method", None)
        other._live |= {} if method is None else {"method": method}
        old, new = self.config.data, config.data
        if (old.name, old.options, old.test) == (new.name, new.options, new.test):
            other.__dict__.update({key: self.__dict__[key] for key in ("source", "tested") if key in self.__dict__})
        return other

    def forget_weights(self) -> None:
        """Frees the full network's weights and what holds them; asked for again, they are made again."""
        for part in ("context", "model", "_template", "_base"):
            self.__dict__.pop(part, None)

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """The sizes that the fleet trains, smallest first."""
        if self._known is not None:
            return self._known.sizes
        by_label = {size.label: size for size in self.size_of_group.values()}
        return tuple(sorted(by_label.values(), key=lambda size: size.order))

    @property
    def size_of_group(self) -> dict[str, Size]:
        """The size that each device group trains, by the group's key; a group that sits out has none."""
        return self.solved.sizes

    def sizes_of(self, group: DeviceGroup) -> list[Size]:
        """The sizes that a device group trains in some round, smallest first."""
        found = {self.size_of_group[key] for key in self._keys_of(group) if key in self.size_of_group}
        return sorted(found, key=lambda size: size.order)

    def sits_out(self, group: DeviceGroup) -> str | None:
        """Why a device group never trains anything; None if it does, be it in some rounds."""
        return None if self.sizes_of(group) else self.solved.idle[self._keys_of(group)[0]]

    def _keys_of(self, group: DeviceGroup) -> list[str]:
        """The keys of a device group with each of its budgets."""
        return [kind.key for kind in self.described.kinds() if kind.name == group.name]

    @cached_property
    def solved(self) -> Solved:
        """The size that each device group trains, and the groups that sit out."""
        return solve_sizes(self, self.table, self.described)

    @cached_property
    def fleet(self) -> Fleet:
        """The devices, and who of them sits out."""
        if self.config.devices.infeasible == "error":
            return self.described
        return replace(self.described, idle=frozenset(self.solved.idle))

    @cached_property
    def table(self) -> Table | None:
        """The look-up table of the method; None if it needs none, or if the run has finished."""
        return prepared(self) if self.tabulates and self._known is None else None

    @cached_property
    def context(self) -> Context:
        """The server's context: what server and clients both know, and what only the server holds."""
        return self.context_for(self.sizes, self.table)

    def cost(
        self, size: Size, context: Context | None = None, state: Any = None, method: Method[Any] | None = None
    ) -> Cost:
        """What a client of that size costs; by default with this experiment's method, in its first state."""
        context, method = context or self.context, method or self.method
        state = method.init(context) if state is None else state
        return measure(context, method, state, size, self.example)


def metric_names(experiment: Experiment) -> list[str]:
    """The names of the task's metrics, found by evaluating an output of zeros; an error if it lacks some."""
    task = experiment.task
    metrics = dict(task.metrics(example_sums(experiment)))
    missing = [name for name in (task.metric, "loss") if name not in metrics]
    if missing:
        raise ConfigError(
            f"task: its metrics are {', '.join(metrics) or 'none'}; {', '.join(missing)} must be there too"
        )
    return list(metrics)


def example_sums(experiment: Experiment) -> Sums:
    """The sums of the task, found by evaluating an output of zeros."""
    about, task = experiment.signature, experiment.task
    network = hollow(experiment.context.template, constants=False).eval()
    with without_data(), torch.no_grad():
        output = network(about.example(2))
    if not isinstance(output, Tensor):
        raise ModelError(f"the model returns a {type(output).__name__}; it must return one tensor")
    y = experiment.example.y[:1].expand(2, *about.target_shape)
    return task.sums(torch.zeros(output.shape), torch.zeros(y.shape, dtype=y.dtype))


def evaluation_part(experiment: Experiment) -> Part:
    """The server's test samples; an error that says how to do without if there are none."""
    data = experiment.tested
    if data is None or data.test is None:
        raise DataError(
            'the data has no test part to evaluate on; give it one, or set evaluation.on = ["clients"] and '
            "data.validation above 0"
        )
    return data.test
