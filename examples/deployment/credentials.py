"""Keys and certificates of a deployment: an authority, the SuperLink's certificate, a key pair a SuperNode.

    python examples/deployment/credentials.py FOLDER --nodes 2 --host superlink.example.org --host 10.0.0.5

FOLDER then holds ca.crt (for nodes and users), server.crt and server.key (for the SuperLink), node0 and node0.pub and
so on (a node's private key, for that node alone, and its public key, which is registered), and flwr/config.toml for
`flwr`. Files with a private key can be read by their owner only; the authority's own key is used once and not kept.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 365
PORT = 8000


def write_credentials(folder: Path, nodes: int, hosts: list[str], port: int = PORT) -> None:
    """Write all files; refuses a folder that holds some already, because nodes would lose their access.

    Args:
        folder: new or empty.
        nodes: number of SuperNodes.
        hosts: names and addresses by which nodes and users reach the SuperLink; the first one stands in config.toml.
        port: of the SuperLink.

    Raises:
        FileExistsError: the folder holds files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; pass a new folder")
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = _named("FedMJP deployment")
    ca = _certificate(issuer, issuer, authority.public_key(), authority, authority=True)
    names = [x509.DNSName(h) if _address(h) is None else x509.IPAddress(_address(h)) for h in hosts]
    own = _certificate(_named(hosts[0]), issuer, server.public_key(), authority, names=names)
    for name, certificate in (("ca.crt", ca), ("server.crt", own)):
        (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "server.key", server, serialization.PrivateFormat.TraditionalOpenSSL)
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(folder / f"node{number}", key, serialization.PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"node{number}.pub").write_bytes(public + b"\n")
    (folder / "flwr").mkdir()
    (folder / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "deployment"\n\n[superlink.deployment]\naddress = "{hosts[0]}:{port}"\n'
        f'root-certificates = "{(folder / "ca.crt").resolve()}"\n',
        encoding="utf-8",
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    signing: ec.EllipticCurvePrivateKey,
    *,
    authority: bool = False,
    names: list[x509.GeneralName] | None = None,
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signing, hashes.SHA384())


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    content = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Keys and certificates of a SuperLink and its SuperNodes.")
    parser.add_argument("folder", type=Path, help="new or empty; keep it out of version control")
    parser.add_argument("--nodes", type=int, required=True, help="number of SuperNodes")
    parser.add_argument("--host", action="append", required=True, help="name or address of the SuperLink (repeatable)")
    parser.add_argument("--port", type=int, default=PORT, help=f"of the SuperLink ({PORT})")
    given = parser.parse_args(arguments)
    if given.nodes < 1:
        parser.error(f"--nodes must be at least 1, not {given.nodes}")
    try:
        write_credentials(given.folder, given.nodes, given.host, given.port)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.folder}: ca.crt, server.crt, server.key, {given.nodes} key pairs, flwr/config.toml")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
