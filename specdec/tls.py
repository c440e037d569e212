"""Certificates of TLS: read from PEM files, checked, and read again when the files change.

What is replaced is found by content, so that it makes no difference how it is: written over, moved
into place, or by the exchanged symbolic links of a Kubernetes volume. Files that do not fit each
other, because someone is half-way through replacing them, change nothing until they do.
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog


class TlsError(Exception):
    """The files of TLS cannot be used. The message is one line that names the file."""


@dataclass(frozen=True)
class Pems:
    """The content of the files, which is known to fit."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


@dataclass(frozen=True)
class TlsFiles:
    """Where one side of a connection has its certificates."""

    ca: Path | None = None
    """Of the CAs that the other side's certificate must be of."""
    cert: Path | None = None
    """The certificate that is shown to the other side, with those between it and its CA."""
    key: Path | None = None
    """The private key of `cert`."""

    def read(self) -> Pems:
        """Reads all of them.

        Raises:
            TlsError: a file cannot be read, is not PEM, or does not fit the others.
        """
        pems = self.content()
        if self.ca is not None and pems.ca is not None:
            _check_ca(self.ca, pems.ca)
        if self.cert is not None and self.key is not None:
            _check_pair(self.cert, self.key)
        # The pair was checked by the names of the files. What they hold now must be what they held.
        if self.content() != pems:
            raise TlsError(f"{self.cert or self.ca} is just being replaced")
        return pems

    def content(self) -> Pems:
        """What the files hold, whether it fits or not.

        Raises:
            TlsError: a file cannot be read.
        """
        return Pems(_bytes(self.ca), _bytes(self.cert), _bytes(self.key))


def _bytes(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror}") from error


def _check_ca(path: Path, content: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode())
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(
            f"{path} is no PEM file of certificates of CAs, or not a whole one"
        ) from error


def _check_pair(cert: Path, key: Path) -> None:
    def refuse() -> str:
        # Without this OpenSSL would ask on the terminal.
        raise TlsError(f"the key in {key} is encrypted: it must be stored without a passphrase")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the key in {key} is not that of the certificate in {cert}"
        else:
            message = f"{cert} and {key} are not a whole certificate and its key in PEM"
        raise TlsError(message) from error
    except OSError as error:
        raise TlsError(f"cannot read {cert} and {key}: {error.strerror}") from error


class Watched:
    """Files that are replaced while the process runs. May be asked from any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """
        Raises:
            TlsError: they cannot be used as they are now.
        """
        self.files = files
        self._pems = files.read()
        self._complaint = ""
        self._lock = threading.Lock()
        # The library asks from threads of its own, where nothing is bound.
        self._log = structlog.get_logger().bind(**structlog.contextvars.get_contextvars())

    def latest(self) -> Pems:
        """What is to be used: what the files hold now, or the last that fitted.

        It is the same object as before if nothing was replaced. What does not fit is logged, once.
        """
        with self._lock:
            try:
                if self.files.content() != self._pems:
                    self._pems = self.files.read()
                    self._log.info("certificates replaced")
                self._complaint = ""
            except TlsError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    self._log.warning("old certificates stay in use", error=self._complaint)
            return self._pems


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Of a server that reads its files anew at every connection that is made.

    If there is a `ca`, clients must show a certificate of it. There must be `cert` and `key`.

    Raises:
        TlsError: the files cannot be used as they are now.
    """
    watched = Watched(files)
    given = watched.latest()

    def configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
        assert pems.cert is not None
        assert pems.key is not None
        return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

    def replacement() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        pems = watched.latest()
        if pems is given:
            return None
        given = pems
        return configuration(pems)

    return grpc.dynamic_ssl_server_credentials(
        configuration(given),
        replacement,  # type: ignore[arg-type] # None is no change, which the stubs do not know
        require_client_authentication=files.ca is not None,
    )


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    """Of a client."""
    return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)


def missing(prefix: str, *, cert: Path | None, key: Path | None) -> str | None:
    """Which of a certificate and its key is missing, if one of them is there.

    Args:
        prefix: of the names of the settings, such as "tls_".
        cert: the file of the certificate.
        key: the file of its key.
    """
    if (cert is None) == (key is None):
        return None
    there, absent = ("cert", "key") if key is None else ("key", "cert")
    return f"{prefix}{there} needs {prefix}{absent} too: a certificate and its key go together"
