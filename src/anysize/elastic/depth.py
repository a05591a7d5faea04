"""Removing and restoring blocks: the depths at which any module with repeated shape-preserving blocks can run.

A *stage* is a row of blocks of one kind, where each block's input is the output of the one before it. The first block
always stays. Another block can be removed if its output has the shape of its input, or of its first input if it has
several (a layer that also gets a mask). `stages` finds them by one forward on the meta device; a removed block becomes
the identity. Depth d keeps the first d blocks of every stage: depth 1 is the shallowest network, and the number of
blocks in the longest stage is the depth of the whole network.

>>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
>>> found = stages(net, torch.zeros(1, 2))
>>> print(found[0])
0: 3 blocks, of which 2 can be removed: 2 to 3, 4 to 5
>>> without(net, found, 2)[4]
Identity()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anysize.elastic.skeleton import copied, hollow
from anysize.elastic.tracing.forward import without_data
from anysize.errors import ModelError, unknown

Fill = Literal["zeros", "identity", "replicate", "random"]

_LONGEST_BLOCK = 4
"""The most modules in a row, such as convolution, norm and ReLU, that are tried as one block."""


@dataclass(frozen=True)
class Stage:
    """A row of blocks of one kind.

    Attributes:
        first: the block that always stays, as the dotted names of its modules; empty if the user named the blocks.
        blocks: the blocks that can be removed, in the order in which they run.
        given_more: modules in these blocks that are called with more than one argument.

    >>> str(Stage(("a.0",), (("a.1",), ("a.2",))))
    'a.0: 3 blocks, of which 2 can be removed: a.1, a.2'
    """

    first: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    given_more: frozenset[str] = frozenset()

    def removed(self, depth: int) -> tuple[tuple[str, ...], ...]:
        """The blocks that a network of that depth lacks."""
        return self.blocks[max(depth, 1) - 1 :]

    def __str__(self) -> str:
        names = ", ".join(block[0] if len(block) == 1 else f"{block[0]} to {block[-1]}" for block in self.blocks)
        name = self.first[0] if self.first else self.blocks[0][0]
        return f"{name}: {len(self.blocks) + 1} blocks, of which {len(self.blocks)} can be removed: {names}"


def full_depth(found: Sequence[Stage]) -> int:
    """The depth of the whole network: the number of blocks in its longest stage.

    >>> full_depth([Stage(("a",), (("b",), ("c",)))]), full_depth([])
    (3, 1)
    """
    return 1 + max((len(stage.blocks) for stage in found), default=0)


def removed_modules(found: Sequence[Stage], depth: int | None) -> set[str]:
    """The dotted names of the modules that a network of that depth lacks; None is the whole depth."""
    if depth is None:
        return set()
    return {name for stage in found for block in stage.removed(depth) for name in block}


def without(module: nn.Module, found: Sequence[Stage], depth: int | None) -> nn.Module:
    """A copy of the module at that depth: removed blocks are the identity, all other tensors are shared."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    given_more = {name for stage in found for name in stage.given_more}
    for name in removed_modules(found, depth):
        memo[id(module.get_submodule(name))] = Skipped() if name in given_more else nn.Identity()
    return copied(module, memo)


class Skipped(nn.Identity):
    """Returns its first argument and ignores all others."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a tensor belongs to one of the modules.

    >>> is_inside("stage.1.weight", {"stage.1"}), is_inside("stage.10.weight", {"stage.1"})
    (True, False)
    """
    return any(name.startswith(f"{module}.") for module in modules)


# --- restoring --------------------------------------------------------------------------------------------------


def restored(
    tensors: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    found: Sequence[Stage],
    depth: int | None,
    fill: Fill = "zeros",
    random: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The tensors that the inverse transformation puts in place of the removed blocks, by name.

    Args:
        tensors: the tensors of the shallow network.
        like: tensors with the removed blocks' names and shapes; "random" draws from their mean and spread.
        found: the stages.
        depth: the depth of the shallow network.
        fill: "zeros"; "identity": in a block with a single weight and as many inputs as outputs, the weight that passes
            the input on, elsewhere zeros, which pass it on in a residual block; "replicate": a copy of the last block
            of the stage that was kept, where it fits; "random".
        random: the generator for "random".

    >>> stage = Stage(("0",), (("1",),))
    >>> restored({"0.weight": torch.ones(1)}, {"1.weight": torch.zeros(1)}, [stage], 1, "replicate")
    {'1.weight': tensor([1.])}
    """
    made: dict[str, Tensor] = {}
    for stage in found:
        removed = stage.removed(depth or full_depth(found))
        kept = [stage.first, *stage.blocks[: len(stage.blocks) - len(removed)]]
        for block in removed:
            own = {name: tensor for name, tensor in like.items() if is_inside(name, block)}
            passing = fill == "identity" and sum(tensor.dim() > 1 for tensor in own.values()) == 1
            for name, tensor in own.items():
                source = tensors.get(_counterpart(name, block, kept[-1]))
                made[name] = _passing(tensor) if passing else _filled(tensor, source, fill, random)
    return made


def _passing(like: Tensor) -> Tensor:
    """The tensor with which a layer without a shortcut passes its input on: an identity weight, a norm's scale of one.

    >>> _passing(torch.zeros(2, 2, 1)).tolist()
    [[[1.0], [0.0]], [[0.0], [1.0]]]
    """
    made = torch.zeros_like(like)
    if like.dim() == 1:
        return torch.ones_like(like) if bool((like == 1).all()) else made  # the scale of a norm starts as one
    if like.shape[0] == like.shape[1] and all(size % 2 for size in like.shape[2:]):
        centre = tuple(size // 2 for size in like.shape[2:])
        for unit in range(like.shape[0]):
            made[(unit, unit, *centre)] = 1
    return made


def _counterpart(name: str, block: Sequence[str], other: Sequence[str]) -> str:
    """The name of the tensor that has in `other` the place of `name` in `block`; "" if there is none."""
    pairs = (f"{there}{name[len(here) :]}" for here, there in zip(block, other) if name.startswith(f"{here}."))
    return next(pairs, "")


def _filled(like: Tensor, source: Tensor | None, fill: Fill, random: torch.Generator | None) -> Tensor:
    if fill == "replicate" and source is not None and source.shape == like.shape:
        return source
    if fill == "random" and like.is_floating_point():
        spread = like.std(unbiased=False) if like.numel() > 1 else torch.zeros(())
        return like.mean() + spread * torch.randn(like.shape, generator=random, dtype=like.dtype)
    return torch.zeros_like(like)


# --- finding ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """The first input and the output of a module's only call; tensors are compared by identity."""

    given: Tensor
    gave: Tensor
    more: bool = False  # whether it received more inputs

    @property
    def preserves(self) -> bool:
        return self.given.shape == self.gave.shape and self.given.dtype == self.gave.dtype


def stages(module: nn.Module, example: Tensor, blocks: Sequence[Sequence[str]] = ()) -> tuple[Stage, ...]:
    """The stages of a module, outermost first; blocks inside blocks are not searched for.

    Args:
        module: any module; it is left untouched.
        example: an input; only its shape and type matter.
        blocks: the user's choice, instead of a search: for each stage the names of the modules that can be removed, in
            the order in which they run.

    Raises:
        ModelError: if a named block cannot be removed.
    """
    calls = _calls(module, example)
    if blocks:
        return _named(module, calls, blocks)
    shared = _shared(module)
    return tuple(_found(module, "", calls, shared))


def why_none(module: nn.Module) -> str:
    """Why a module has no stage, and what to do about it."""
    stacked = [
        f"'{path}' stacks {part.num_layers} layers inside one module, which cannot be taken apart"
        for path, part in module.named_modules()
        if isinstance(part, nn.RNNBase) and part.num_layers > 1
    ]
    reasons = "; ".join(stacked) or "no modules of one kind follow each other and preserve their input's shape"
    return (
        f"the model has no blocks that can be removed: {reasons}. Write repeated blocks as separate modules, or "
        "name them in model.blocks"
    )


def _calls(module: nn.Module, example: Tensor) -> dict[str, _Call | None]:
    """The call of every module that maps a tensor to a tensor; None for modules called twice or in another way."""
    bare = hollow(module, constants=False).eval()
    seen: dict[str, list[_Call | None]] = {}

    def watch(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            plain = bool(args) and isinstance(args[0], Tensor) and isinstance(output, Tensor)
            more = len(args) > 1 or bool(kwargs)
            seen.setdefault(path, []).append(_Call(args[0], output, more) if plain else None)

        return hook

    for path, part in bare.named_modules():
        part.register_forward_hook(watch(path), with_kwargs=True)
    with without_data(), torch.no_grad():
        bare(example.to("meta"))
    return {path: own[0] if len(own) == 1 else None for path, own in seen.items()}


def _found(module: nn.Module, path: str, calls: Mapping[str, _Call | None], shared: set[str]) -> Iterator[Stage]:
    """The stages among the children of a module, and inside those children that belong to no stage."""
    children = [(f"{path}.{name}" if path else name, child) for name, child in module._modules.items()]
    names = [name for name, child in children if child is not None]
    kinds = [_kind(child) for _, child in children if child is not None]
    place = 0
    while place < len(names):
        length, count = _repeats(names, kinds, place, calls)
        rows = [tuple(names[place + i * length : place + (i + 1) * length]) for i in range(count)]
        stage = _stage(module, rows, calls, shared, path)
        if stage is not None:
            yield stage
            place += length * count
            continue
        yield from _found(
            module.get_submodule(names[place][len(path) + 1 if path else 0 :]), names[place], calls, shared
        )
        place += 1


def _stage(
    owner: nn.Module, rows: Sequence[tuple[str, ...]], calls: Mapping[str, _Call | None], shared: set[str], path: str
) -> Stage | None:
    """The stage that these blocks form; None if no block after the first can be removed."""
    start = len(path) + 1 if path else 0

    def removable(row: tuple[str, ...]) -> bool:
        parameters = any(True for name in row for _ in owner.get_submodule(name[start:]).parameters())
        return parameters and _preserves(row, calls) and not shared & set(row)

    blocks = tuple(row for row in rows[1:] if removable(row))
    return Stage(rows[0], blocks, _given_more(blocks, calls)) if blocks else None


def _given_more(blocks: Iterable[tuple[str, ...]], calls: Mapping[str, _Call | None]) -> frozenset[str]:
    return frozenset(name for block in blocks for name in block if (call := calls.get(name)) is not None and call.more)


def _preserves(row: Sequence[str], calls: Mapping[str, _Call | None]) -> bool:
    first, last = calls.get(row[0]), calls.get(row[-1])
    return first is not None and last is not None and _Call(first.given, last.gave).preserves


def _repeats(
    names: Sequence[str], kinds: Sequence[Any], place: int, calls: Mapping[str, _Call | None]
) -> tuple[int, int]:
    """(modules in a block, blocks) of the row of blocks that starts at `place` and covers the most modules."""
    best = (1, 1)
    for length in range(1, _LONGEST_BLOCK + 1):
        count, end = 1, place + length
        while (
            kinds[end : end + length] == kinds[place : place + length]
            and len(kinds[end : end + length]) == length
            and _chained(names[end - length : end + length], calls)
        ):
            count, end = count + 1, end + length
        if count > 1 and length * count > best[0] * best[1]:
            best = (length, count)
    return best


def _chained(names: Sequence[str], calls: Mapping[str, _Call | None]) -> bool:
    """Whether each module's input is the very tensor that the module before it returned."""
    own = [calls.get(name) for name in names]
    return all(a is not None and b is not None and b.given is a.gave for a, b in pairwise(own))


def _kind(module: nn.Module) -> Any:
    """What two blocks of one kind have in common: their type, and for a plain sequence of layers the types in it."""
    if type(module) is nn.Sequential:
        return (nn.Sequential, *(_kind(child) for child in module))
    return type(module)


def _shared(module: nn.Module) -> set[str]:
    """The modules that share a tensor with a neighbour: removing one would rename the neighbour's tensor."""
    owners: dict[int, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append(path)
    found: set[str] = set()
    for paths in owners.values():
        if len(paths) > 1:
            found |= {prefix for path in paths for prefix in _prefixes(path) if not _holds_all(prefix, paths)}
    return found


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _holds_all(prefix: str, paths: Sequence[str]) -> bool:
    return all(path == prefix or path.startswith(f"{prefix}.") for path in paths)


def _named(module: nn.Module, calls: Mapping[str, _Call | None], blocks: Sequence[Sequence[str]]) -> tuple[Stage, ...]:
    """The stages that the user named; refuses each name that cannot be removed, with the reason."""
    parts = dict(module.named_modules(remove_duplicate=False))
    shared = _shared(module)
    problems = []
    made = []
    for stage in blocks:
        names = [_full_name(name, parts) for name in stage]
        problems += [problem for name in names if (problem := _obstacle(name, parts, calls, shared)) is not None]
        own = tuple((name,) for name in names)
        made.append(Stage((), own, _given_more(own, calls)))
    if problems:
        raise ModelError("model.blocks: " + "; ".join(problems))
    return tuple(stage for stage in made if stage.blocks)


def _full_name(name: str, parts: Mapping[str, nn.Module]) -> str:
    """The module's full name, also if a normalisation layer wraps the user's network."""
    return name if name in parts or f"network.{name}" not in parts else f"network.{name}"


def _obstacle(
    name: str, parts: Mapping[str, nn.Module], calls: Mapping[str, _Call | None], shared: set[str]
) -> str | None:
    if name not in parts:
        owner = name.rpartition(".")[0]
        if isinstance(parts.get(owner), nn.RNNBase) or isinstance(parts.get(name.partition("_l")[0]), nn.RNNBase):
            return f"'{name}': the layers inside one recurrent module cannot be removed; write them as separate modules"
        return unknown("module", name, [path for path in parts if path])
    call = calls.get(name)
    if call is None:
        return f"'{name}' is not called exactly once with a tensor as its first argument and its result"
    if not call.preserves:
        return (
            f"'{name}' turns shape {tuple(call.given.shape)} into {tuple(call.gave.shape)}; only blocks that keep the "
            "shape can be removed"
        )
    if name in shared:
        return f"'{name}' shares a tensor with a module outside it"
    return None
