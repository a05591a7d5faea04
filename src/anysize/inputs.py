"""What a network receives: one tensor, or several tensors by name.

`Inputs` holds named tensors whose first axis counts the same samples. Code that cuts, joins or moves a batch treats it
as a tensor; only the module that calls the network by keyword, and the code that reads samples, look inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, overload

from torch import Tensor
from torch.utils import _pytree

from anysize.errors import ConfigError


class Inputs:
    """Tensors by name, with one row of each for every sample.

    Its length is the number of samples; an index takes these samples of every tensor, a name gives one tensor.

    >>> import torch
    >>> batch = Inputs({"ids": torch.tensor([[5, 7], [6, 0]]), "mask": torch.tensor([[1, 1], [1, 0]])})
    >>> len(batch), batch[:1]["ids"].tolist(), torch.cat([batch, batch])["mask"].shape
    (2, [[5, 7]], torch.Size([4, 2]))
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def keys(self) -> list[str]:
        """The names, in order."""
        return list(self._tensors)

    def values(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the names."""
        return tuple(self._tensors.values())

    def items(self) -> list[tuple[str, Tensor]]:
        """Names and tensors."""
        return list(self._tensors.items())

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same names with changed tensors."""
        return Inputs({name: change(tensor) for name, tensor in self._tensors.items()})

    def to(self, *args: Any, **kwargs: Any) -> Inputs:
        """All tensors on another device."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    @property
    def is_meta(self) -> bool:
        """Whether the tensors have no contents."""
        return any(tensor.is_meta for tensor in self._tensors.values())

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    @overload
    def __getitem__(self, index: str) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice | Tensor) -> Inputs: ...

    def __getitem__(self, index: Any) -> Any:
        return self._tensors[index] if isinstance(index, str) else self.map(lambda tensor: tensor[index])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __repr__(self) -> str:
        return f"Inputs({', '.join(f'{name} {tuple(tensor.shape)}' for name, tensor in self._tensors.items())})"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a function such as torch.cat gives for the tensors of each name."""
        first = args[0]
        lists = isinstance(first, list | tuple)
        names = (first[0] if lists else first).keys()
        return cls(
            {
                name: function([one[name] for one in first] if lists else first[name], *args[1:], **(kwargs or {}))
                for name in names
            }
        )


Input: TypeAlias = Tensor | Inputs
"""What a network receives."""


def tensors_in(x: Input) -> tuple[Tensor, ...]:
    """The tensors of an input, as a network takes them in a row."""
    return x.values() if isinstance(x, Inputs) else (x,)


def named(x: Input) -> list[tuple[str, Tensor]]:
    """The tensors of an input by name; a single tensor's name is empty."""
    return x.items() if isinstance(x, Inputs) else [("", x)]


def mapped(x: Input, change: Callable[[Tensor], Tensor]) -> Any:
    """The input with every tensor changed."""
    return x.map(change) if isinstance(x, Inputs) else change(x)


def one_tensor(x: Input, why: str) -> Tensor:
    """The input, which must be one tensor; `why` says who needs that."""
    if isinstance(x, Inputs):
        raise ConfigError(f"{why} needs one input of numbers; the data has {', '.join(x)}")
    return x


# Functions that look into arguments, such as vmap, need to know what an `Inputs` holds.
_pytree.register_pytree_node(
    Inputs, lambda x: (list(x.values()), x.keys()), lambda tensors, names: Inputs(dict(zip(names, tensors)))
)
