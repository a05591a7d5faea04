"""Data sets by name, and their division among clients."""

from anysize.data.augment import augment
from anysize.data.named import datasets, facts, stand_in, without_files
from anysize.data.partition import SPLITS, DeviceShares, RemoteShares, Shares, split
from anysize.data.parts import (
    CollatedPart,
    Data,
    DatasetPart,
    Part,
    PartLike,
    Share,
    SubsetPart,
    TensorPart,
    channel_statistics,
    groups_of,
    largest_token,
    to_input,
)
from anysize.data.sources import defaults, from_function, load

__all__ = [
    "SPLITS",
    "CollatedPart",
    "Data",
    "DatasetPart",
    "DeviceShares",
    "Part",
    "PartLike",
    "RemoteShares",
    "Share",
    "Shares",
    "SubsetPart",
    "TensorPart",
    "augment",
    "channel_statistics",
    "datasets",
    "defaults",
    "facts",
    "from_function",
    "groups_of",
    "largest_token",
    "load",
    "split",
    "stand_in",
    "to_input",
    "without_files",
]
