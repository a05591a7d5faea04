"""Sums that a server learns without learning what any one member adds: double masking, in four steps.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, within a group whose
members all know one another. Words are whole numbers modulo 2^64.

    step      a member tells                                               the server tells
    keys      two public keys                                              all members' public keys
    shares    for each other member, encrypted for it: a share of its      the shares that the others encrypted for it
              seed and a share of its first private key
    words     its words + the mask of its seed + for each other member     who sent words
              the mask of their common secret, which that member subtracts
    unmask    of each member that sent words, its share of the seed; of    -
              each that did not, its share of the key

With enough shares the server takes the masks of the seeds off the sum, and those that missing members leave behind.
It needs `needed` of them, more than two thirds of the members. A member tells one share of each other member and tells
it once; so even a server that tells members different things cannot get all that hides a single member's words. It
could by inventing members: members believe that the keys come from devices.

What hides a member is that the others add what the server does not know. So members also check that all of them add
what they learned from the same message: from another one they could learn what the server foresees, such as nothing
at all (Pasquini et al., "Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022).

Keys, their agreement (ECDH), encryption (Fernet) and shares (Shamir) are Flower's. Its masks are not used, since they
come from a generator with a seed of 32 bits, which a server can try out; here they are ChaCha20's.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

import numpy as np
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt, generate_shared_key
from flwr.common.secure_aggregation.secaggplus_utils import share_keys_plaintext_concat, share_keys_plaintext_separate
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)

from anysize.errors import TrustError
from anysize.methods.sums import CLIENTS, Words

Step = Literal["keys", "shares", "words", "unmask", "done"]
_NEXT: dict[Step, Step] = {"keys": "shares", "shares": "words", "words": "unmask", "unmask": "done"}


class Keys(NamedTuple):
    """A member's public keys: one for masks, one for what is sent to it through the server."""

    mask: bytes
    post: bytes


def needed(members: int, threshold: int) -> int:
    """How many of a group's members must stay to the end: the threshold, and more than two thirds.

    >>> [needed(members, 3) for members in (3, 4, 5, 7, 10, 100)]
    [3, 3, 4, 5, 7, 67]
    """
    return max(threshold, 2 * members // 3 + 1)


class Member:
    """A member's side of one sum; each step once, in order.

    Args:
        own: the member's number.
        threshold: the fewest members in a sum that its words may be part of.
        message: what it learned from, or a digest of it; the same for all members.
    """

    def __init__(self, own: int, threshold: int, message: bytes = b"") -> None:
        self._own, self._threshold, self._message = own, threshold, message
        self._mask, self._post = generate_key_pairs()[0], generate_key_pairs()[0]
        self._seed = os.urandom(32)
        self._step: Step = "keys"
        self._keys: dict[int, Keys] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}

    @property
    def members(self) -> int:
        """How many members the sum has, as far as it is known."""
        return len(self._keys)

    def keys(self) -> Keys:
        """Its public keys."""
        self._go("keys")
        return self._public()

    def shares(self, keys: Mapping[int, Keys]) -> dict[int, bytes]:
        """For each other member, encrypted for it: a share of the seed, and one of the private key for masks.

        Args:
            keys: every member's public keys, its own among them.
        """
        self._go("shares")
        if len(keys) < self._threshold:
            raise TrustError(f"a sum over {len(keys)} devices was asked for; this one takes part in {self._threshold}")
        if len(keys) > CLIENTS:
            raise TrustError(f"a sum over {len(keys)} devices was asked for; it can have {CLIENTS}")
        if keys.get(self._own) != self._public():
            raise TrustError("the server shows others keys that are not this device's")
        if len({key for pair in keys.values() for key in pair}) < 2 * len(keys):
            raise TrustError("several devices have the same key")
        self._keys = dict(sorted(keys.items()))
        least = needed(len(keys), self._threshold)
        seeds = create_shares(self._seed, least, len(keys))
        secrets = create_shares(private_key_to_bytes(self._mask), least, len(keys))
        sent = {}
        for member, seed, secret in zip(self._keys, seeds, secrets):
            if member == self._own:
                self._held[member] = seed, secret
            else:
                text = self._group() + share_keys_plaintext_concat(self._own, member, seed, secret)
                sent[member] = encrypt(common(self._post, self._keys[member].post), text)
        return sent

    def words(self, shares: Mapping[int, bytes], words: Words) -> Words:
        """Its words, masked.

        Args:
            shares: what the others encrypted for it; who sent none is no part of the sum.
            words: what it adds.
        """
        self._go("words")
        for member, text in shares.items():
            self._held[member] = self._opened(member, text)
        if len(self._held) < needed(len(self._keys), self._threshold):
            raise TrustError(
                f"only {len(self._held)} of {len(self._keys)} devices are left, and a sum needs "
                f"{needed(len(self._keys), self._threshold)}"
            )
        masked = words + mask(self._seed, len(words))
        for member in self._held:
            if member != self._own:
                masked += _signed(self._own, member, common(self._mask, self._keys[member].mask), len(words))
        return masked

    def unmask(self, alive: Collection[int]) -> dict[int, bytes]:
        """Its share of each member's seed that sent words, and of each other member's key.

        Args:
            alive: the members whose words the server has.
        """
        self._go("unmask")
        there = set(alive)
        if not there <= set(self._held) or self._own not in there:
            raise TrustError("the server asks about devices that are no part of the sum, or says that this one is not")
        if len(there) < needed(len(self._keys), self._threshold):
            raise TrustError(
                f"the server asks for a sum over {len(there)} of {len(self._keys)} devices; it needs "
                f"{needed(len(self._keys), self._threshold)}"
            )
        return {member: held[0] if member in there else held[1] for member, held in self._held.items()}

    def _go(self, step: Step) -> None:
        """Begin a step; an error if it is not the next one."""
        if step != self._step:
            raise TrustError(f'the server asks for "{step}", and the next step of this sum is "{self._step}"')
        self._step = _NEXT[step]

    def _public(self) -> Keys:
        return Keys(*(public_key_to_bytes(key.public_key()) for key in (self._mask, self._post)))

    def _group(self) -> bytes:
        """The same for members that were shown the same keys, have the same threshold and got the same message."""
        told = [
            self._threshold,
            self._message.hex(),
            [[member, *map(bytes.hex, keys)] for member, keys in self._keys.items()],
        ]
        return hashlib.sha256(json.dumps(told).encode()).digest()

    def _opened(self, member: int, text: bytes) -> tuple[bytes, bytes]:
        """The shares that a member encrypted for this one."""
        if member not in self._keys or member == self._own:
            raise TrustError(f"shares of device {member} came, which is no part of the sum")
        try:
            plain = decrypt(common(self._post, self._keys[member].post), text)
        except InvalidToken:
            raise TrustError(f"the shares of device {member} are not what it encrypted for this one") from None
        group, plain = plain[:32], plain[32:]
        if group != self._group():
            raise TrustError(
                f"the server tells device {member} of other members or of another threshold, or sent it another message"
            )
        source, receiver, seed, secret = share_keys_plaintext_separate(plain)
        if (source, receiver) != (member, self._own):
            raise TrustError(f"the shares of device {member} are for device {receiver}, from device {source}")
        return seed, secret


class Collector:
    """The server's side of one sum.

    Args:
        threshold: the fewest members of a sum.

    Each step takes what members told and returns what each of those that are left is told next.
    """

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._keys: dict[int, Keys] = {}
        self._met: set[int] = set()
        self._total: Words | None = None
        self._alive: set[int] = set()

    def met(self, keys: Mapping[int, Keys]) -> dict[int, Keys]:
        """All members' keys, for each of them."""
        self._keys = dict(sorted(keys.items()))
        self._check(self._keys, self._threshold)
        if len(keys) > CLIENTS:
            raise TrustError(f"{len(keys)} devices of one size; a sum can have {CLIENTS}")
        return self._keys

    def passed_on(self, shares: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """For each member left, what the others encrypted for it."""
        others = set(self._keys)
        self._met = {member for member, own in shares.items() if set(own) == others - {member}}
        self._check(self._met, self.needed)
        return {to: {of: shares[of][to] for of in sorted(self._met - {to})} for to in sorted(self._met)}

    def add(self, member: int, words: Words) -> None:
        """Take a member's masked words."""
        if member not in self._met or member in self._alive:
            raise TrustError(f"device {member} sent words that nobody asked for")
        if self._total is not None and words.shape != self._total.shape:
            raise TrustError(f"device {member} sent {len(words)} words; others sent {len(self._total)}")
        self._alive.add(member)
        self._total = words.copy() if self._total is None else self._total + words

    def alive(self) -> list[int]:
        """The members whose words came."""
        self._check(self._alive, self.needed)
        return sorted(self._alive)

    def total(self, shares: Mapping[int, Mapping[int, bytes]]) -> Words:
        """The sum of the words, from what members told in the last step."""
        self._check(self._alive, self.needed)
        assert self._total is not None
        total, length = self._total.copy(), len(self._total)
        for member in sorted(self._alive):
            total -= mask(self._combined(member, shares), length)
        for member in sorted(self._met - self._alive):
            own = self._private(member, shares)
            for other in self._alive:
                total -= _signed(other, member, common(own, self._keys[other].mask), length)
        return total

    @property
    def needed(self) -> int:
        """How many members must stay to the end."""
        return needed(len(self._keys), self._threshold)

    def _combined(self, member: int, shares: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """The secret of which members told their shares; those that have another member's place are left out."""
        places = {other: place + 1 for place, other in enumerate(self._keys)}
        own = [
            given[member]
            for other, given in sorted(shares.items())
            if other in self._alive and member in given and int.from_bytes(given[member][:4], "little") == places[other]
        ]
        self._check(own, self.needed)
        try:
            return combine_shares(own[: self.needed])
        except (ValueError, IndexError) as error:
            raise TrustError(f"the shares of device {member} do not fit together ({error})") from None

    def _private(self, member: int, shares: Mapping[int, Mapping[int, bytes]]) -> ec.EllipticCurvePrivateKey:
        """The private key of a member that is gone."""
        try:
            own = bytes_to_private_key(self._combined(member, shares))
        except ValueError:
            raise TrustError(f"the shares of device {member} make no key") from None
        if public_key_to_bytes(own.public_key()) != self._keys[member].mask:
            raise TrustError(f"the shares of device {member} make another key than its own")
        return own

    def _check(self, left: Collection[object], least: int) -> None:
        if len(left) < least:
            raise TrustError(f"{len(left)} devices of its size were left, and a sum that hides each needs {least}")


def common(own: ec.EllipticCurvePrivateKey, other: bytes) -> bytes:
    """The secret that the owners of two keys share."""
    try:
        return generate_shared_key(own, bytes_to_public_key(other))
    except (ValueError, TypeError, AttributeError) as error:
        raise TrustError(f"a public key is none ({type(error).__name__})") from None


def mask(secret: bytes, length: int) -> Words:
    """Pseudo-random words that follow from a secret, which is used for one sum alone.

    >>> mask(b"a secret", 2).tolist() == mask(b"a secret", 3).tolist()[:2], mask(b"another", 2).dtype
    (True, dtype('uint64'))
    """
    stream = Cipher(algorithms.ChaCha20(hashlib.sha256(secret).digest(), bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * length)), dtype="<u8").astype(np.uint64)


def _signed(own: int, other: int, secret: bytes, length: int) -> Words:
    """The mask that a member adds for another: one of the two adds it, the other one subtracts it."""
    words = mask(secret, length)
    return words if own > other else np.zeros_like(words) - words
