"""Certificates for the tests, and the files that hold them."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from specdec.channels import ClientTls
from specdec.tls import TlsFiles, Watched

LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@dataclass
class Authority:
    """A CA, and a folder of files with certificates of it."""

    folder: Path
    ca: trustme.CA = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ca_file.write_bytes(self.ca.cert_pem.bytes())

    @property
    def ca_file(self) -> Path:
        return self.folder / "ca.crt"

    def issue(self, name: str, *hosts: str, expired: bool = False) -> TlsFiles:
        """Writes a new certificate with the common name `name`, over the one that is there."""
        dates: dict[str, Any] = {}
        if expired:
            dates = {"not_before": LONG_AGO, "not_after": LONG_AGO + datetime.timedelta(days=1)}
        issued = self.ca.issue_cert(*(hosts or ("127.0.0.1",)), common_name=name, **dates)
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        return self.write(name, chain, issued.private_key_pem.bytes())

    def issue_uri(self, name: str, uri: str) -> TlsFiles:
        """Writes a certificate whose only names are a URI and an address."""
        issuer = x509.load_pem_x509_certificate(self.ca.cert_pem.bytes())
        signer: Any = load_pem_private_key(self.ca.private_key_pem.bytes(), None)
        pems = self.ca.issue_cert("unused").private_key_pem.bytes()
        key: Any = load_pem_private_key(pems, None)
        names = [
            x509.UniformResourceIdentifier(uri),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "test")]))
            .issuer_name(issuer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(LONG_AGO)
            .not_valid_after(LONG_AGO + datetime.timedelta(days=20_000))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(signer, hashes.SHA256())
        )
        return self.write(name, certificate.public_bytes(serialization.Encoding.PEM), pems)

    def files(self, name: str) -> TlsFiles:
        """Where the certificate of that name is."""
        return TlsFiles(self.ca_file, self.folder / f"{name}.crt", self.folder / f"{name}.key")

    def write(self, name: str, cert: bytes, key: bytes) -> TlsFiles:
        """Writes files as they are."""
        files = self.files(name)
        assert files.cert is not None
        assert files.key is not None
        files.cert.write_bytes(cert)
        files.key.write_bytes(key)
        return files

    def client(self, name: str, *hosts: str, expired: bool = False) -> ClientTls:
        """That of a client with a new certificate."""
        return ClientTls(Watched(self.issue(name, *hosts, expired=expired)))


def server_options(files: TlsFiles, *names: str) -> dict[str, Any]:
    """The settings of a service that shows `files`, and lets in clients of their CA.

    With `names` only those that have one of them.
    """
    return {
        "tls_cert": files.cert,
        "tls_key": files.key,
        "tls_client_ca": files.ca,
        "tls_client_names": list(names),
    }


def peer_options(files: TlsFiles) -> dict[str, Any]:
    """The settings of a gateway that shows `files` to its services."""
    return {
        "peer_tls_ca": files.ca,
        "peer_tls_cert": files.cert,
        "peer_tls_key": files.key,
    }


def serial_of(files: TlsFiles) -> int:
    """The serial number of the certificate in the file."""
    assert files.cert is not None
    return x509.load_pem_x509_certificate(files.cert.read_bytes()).serial_number
