"""Trains the network that is fine-tuned: on the roles of Shakespeare's comedies, none of which is a client's.

    python experiments/lora/base.py

It writes experiments/lora/base.safetensors, always the same one on the same machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import safetensors.torch
import torch

from anysize import data as data_sets
from anysize import models
from anysize.client.process import one_thread
from anysize.data.parts import groups_of

HERE = Path(__file__).parent
FILE = HERE / "base.safetensors"
COMEDIES = (
    "allswellthatendswell",
    "asyoulikeit",
    "comedyoferrors",
    "loveslabourslost",
    "measureforemeasure",
    "merchantofvenice",
    "merrywivesofwindsor",
    "midsummersnightsdream",
    "muchadoaboutnothing",
    "tamingoftheshrew",
    "tempest",
    "twelfthnight",
    "twogentlemenofverona",
    "winterstale",
)
LENGTH, STEPS, BATCH, RATE = 40, 1000, 32, 3e-3


def train() -> None:
    """Write the base."""
    sys.path.insert(0, str(HERE))
    data = data_sets.load("shakespeare", {"sequence_length": LENGTH})
    comic = torch.tensor([str(group).split("_")[0] in COMEDIES for group in groups_of(data.train)])
    own = comic.nonzero().flatten()
    network = models.build("tinylm:language_model", (LENGTH,), data.classes or 0).train()
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for step in range(STEPS):
        x, y = data.train.batch(own[torch.randint(len(own), (BATCH,), generator=random)])
        loss = torch.nn.functional.cross_entropy(network(x.long()).flatten(0, 1), y.long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 250 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr)
    safetensors.torch.save_file(network.state_dict(), FILE)


if __name__ == "__main__":
    with one_thread():
        train()
