"""A local authority, a certificate for the server, and a key pair for each device.

The authority signs the server's certificate only; a device proves who it is by the key that the server has on its
list. Whoever holds the authority's key can pretend to be the server, so it belongs on the server and nowhere else.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anysize.config.extras import needs
from anysize.errors import ConfigError

if (_missing := needs("a fleet", "fleet", "flwr")) is not None:
    raise ConfigError(_missing)

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_BACKDATED = datetime.timedelta(hours=1)  # the clock of a device may be a little behind


@dataclass(frozen=True)
class Pair:
    """A private key and what goes with it: a certificate or a public key, both as bytes of a file."""

    private: bytes
    public: bytes


def authority(name: str, days: int) -> Pair:
    """A self-signed certificate that can sign one level of certificates."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _named(name)
    made = (
        _certificate(subject, subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return Pair(_pem(key), made.public_bytes(serialization.Encoding.PEM))


def server_certificate(signer: Pair, hosts: Sequence[str], days: int) -> Pair:
    """A certificate for a server that is reached under these names and addresses, signed by the authority."""
    problems = [f"host {host!r}: a name or an address without port and prefix is needed" for host in wrong_hosts(hosts)]
    if problems or not hosts:
        raise ConfigError("\n".join(problems) or "the server needs at least one host name or address")
    issuer = x509.load_pem_x509_certificate(signer.public)
    issuer_key = serialization.load_pem_private_key(signer.private, None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    made = (
        _certificate(_named(hosts[0]), issuer.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .sign(issuer_key, hashes.SHA384())
    )
    return Pair(_pem(key), made.public_bytes(serialization.Encoding.PEM))


def device_key() -> Pair:
    """A key pair for one device, on the curve and in the format that Flower takes."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    encoding, form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    return Pair(private, key.public_key().public_bytes(encoding, form) + b"\n")


def wrong_hosts(hosts: Sequence[str]) -> list[str]:
    """The hosts that are neither a host name nor an address.

    >>> wrong_hosts(["fleet.example.org", "10.0.0.7", "::1", "http://fleet", "fleet:8000", ""])
    ['http://fleet', 'fleet:8000', '']
    """
    return [host for host in hosts if not host or (_address(host) is None and not _plain_name(host))]


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _plain_name(host: str) -> bool:
    return all(part and part.replace("-", "").replace("_", "").isalnum() for part in host.split("."))


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _alternative(host: str) -> x509.GeneralName:
    address = _address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
