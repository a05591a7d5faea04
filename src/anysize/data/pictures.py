"""Pictures in folders, DOMAIN/CLASS/image files, decoded when they are drawn; needs Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from anysize.config.extras import needs
from anysize.data import files
from anysize.data.parts import Array, Data, DatasetPart, channel_statistics
from anysize.errors import DataError
from anysize.rng import derive

ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
"""What the name of an image file ends with, in any case."""

FOR_STATISTICS = 500
"""Images from which mean and standard deviation are estimated; decoding more would delay the start."""


class Pictures:
    """Images by their paths, as (size, size, 3) bytes, with their classes: a map-style data set."""

    def __init__(self, paths: Sequence[Path], targets: Sequence[int], size: int) -> None:
        self.paths = list(paths)
        self.targets = list(targets)
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Array, int]:
        from PIL import Image  # an extra, which only sets of pictures need

        path = self.paths[index]
        with files.reading(path), Image.open(path) as image:
            pixels = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
            return np.array(pixels, dtype=np.uint8), self.targets[index]


def pictures(name: str, domains: Sequence[str], classes: Sequence[str], size: int, test_fraction: float) -> Data:
    """The data set in the folder of that name in the search folders, grouped by domain."""
    lacking = needs(f"data set '{name}'", "images", "PIL")
    if lacking:
        raise DataError(lacking)
    if size < 1 or not 0 < test_fraction < 1 or not domains or not classes:
        raise DataError(
            f"{name}: size {size}, test_fraction {test_fraction}, {len(domains)} domains, {len(classes)} classes; "
            "allowed: a size of at least 1, a fraction above 0 and below 1, at least one domain and class"
        )
    folder = files.locate_folder(name)
    if folder is None:
        raise files.missing(name, name, [f"unpack it into a folder {name} (DOMAIN/CLASS/image files)"])
    found = {(domain, kind): _images(folder / domain / kind) for domain in domains for kind in classes}
    empty = [f"{folder / domain / kind}" for (domain, kind), paths in found.items() if len(paths) < 2]
    if empty:
        shown = ", ".join(empty[:5])
        raise DataError(f"{name}: every class of every domain needs two images or more ({', '.join(ENDINGS)}): {shown}")
    train: list[tuple[Path, int, str]] = []
    test: list[tuple[Path, int, str]] = []
    for (domain, kind), paths in found.items():
        rows = [(path, list(classes).index(kind), domain) for path in paths]
        order = np.random.Generator(np.random.PCG64(derive("pictures", domain, kind))).permutation(len(rows))
        held = min(max(1, round(test_fraction * len(rows))), len(rows) - 1)
        test += [rows[place] for place in np.sort(order[:held])]
        train += [rows[place] for place in np.sort(order[held:])]
    part = _part(train, size)
    mean, std = channel_statistics(part, FOR_STATISTICS)
    return Data(
        train=part,
        test=_part(test, size),
        classes=len(classes),
        class_names=list(classes),
        mean=mean,
        std=std,
        source=str(folder),
    )


def _images(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name; none if there is no such folder."""
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in ENDINGS)


def _part(rows: Sequence[tuple[Path, int, str]], size: int) -> DatasetPart:
    paths, targets, groups = zip(*rows)
    return DatasetPart(Pictures(paths, targets, size), group=np.array(groups))  # type: ignore[arg-type]
