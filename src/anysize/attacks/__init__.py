"""Clients that attack, for simulations: what they send in place of what they learned, and what they learn from.

And one attack by whoever has the finished network: was this sample trained on?

`client/attacks.py` is about something else: inputs that are changed to fool a finished network.
"""

from anysize.attacks.data import Poisoned, backdoor_success, flipped, stamped
from anysize.attacks.membership import membership_advantage
from anysize.attacks.updates import Attack, inner_product, noise, scaled

__all__ = [
    "Attack",
    "Poisoned",
    "backdoor_success",
    "flipped",
    "inner_product",
    "membership_advantage",
    "noise",
    "scaled",
    "stamped",
]
