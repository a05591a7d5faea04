"""The names of methods and networks, known before PyTorch is loaded, so that a misspelt one is answered at once."""

from __future__ import annotations

from importlib.metadata import entry_points

from anysize.config.table import refuse
from anysize.config.tables import ExperimentConfig
from anysize.errors import unknown

METHODS = {
    "elf": "ELF",
    "fedavg": "FedAvg",
    "fedhm": "FedHM",
    "fedrolex": "FedRolex",
    "fiarse": "FIARSE",
    "fjord": "FjORD",
    "flanc": "FLANC",
    "heterofl": "HeteroFL",
    "ladder": "Ladder",
    "lora": "LoRA",
    "oat": "OAT",
    "origdrop": "OrigDrop",
    "prism": "PriSM",
    "sheterofl": "SHeteroFL",
    "splitmix": "SplitMix",
}
"""Every method's name, and its class in `anysize.methods`."""

PLUGINS = "anysize.methods"
"""The entry points of methods in other packages."""

MODELS = {
    "alexnet": "convolutional",
    "char-lstm": "recurrent",
    "digits-cnn": "convolutional",
    "elf-cnn": "convolutional",
    "femnist-cnn": "convolutional",
    "flanc-cnn": "convolutional",
    "mlp": "dense",
    "preresnet18": "residual",
    "resnet14": "residual",
    "resnet18": "residual",
    "resnet20": "residual",
    "resnet32": "residual",
    "small-cnn": "convolutional",
    "text-lstm": "recurrent",
    "vgg11": "convolutional",
    "vit-tiny": "attention",
}
"""Every network's name, and the module of `anysize.models` with the function of that name."""


def check_names(config: ExperimentConfig) -> None:
    """Refuse an experiment whose method or network has a name that leads nowhere."""
    problems = []
    for kind, known in (("method", METHODS), ("model", MODELS)):
        name = str(getattr(config, kind).name)
        others = {point.name for point in entry_points(group=PLUGINS)} if kind == "method" else set()
        if ":" not in name and name not in known and name not in others:
            problems.append(f"{kind}.name: {unknown(kind, name, {*known, *others})}; your own is named 'module:{kind}'")
    if problems:
        refuse(problems, "the experiment")
