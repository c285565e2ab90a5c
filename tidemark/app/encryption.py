"""TLS of the sidecar: its certificate, which may rotate, and whom its clients trust."""

import ssl
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from tidemark.common.errors import BadSetting

log = structlog.get_logger(__name__)

CERTIFICATE, KEY, CA = (f"TIDEMARK_SIDECAR_{name}_FILE" for name in ("CERTIFICATE", "KEY", "CA"))
LOOK_EVERY = 1.0  # seconds


class Certificate:
    """The server's side of TLS by two PEM files, which are read again when they change.

    Raises `BadSetting` where they cannot be used at the start; later, the last pair stays.
    """

    def __init__(self, certificate: Path, key: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._files = certificate, key
        self._now = now
        self._looked = now()
        self._complained = False
        self._version = self._stat()
        self._context = _loaded(*self._files)

    def context(self) -> ssl.SSLContext:
        """For a connection that is new."""
        if self._now() - self._looked >= LOOK_EVERY:
            self._looked = self._now()
            self._refresh()
        return self._context

    def _refresh(self) -> None:
        try:
            version = self._stat()
            if version != self._version:
                self._context, self._version = _loaded(*self._files), version
                log.info("Read the certificate again", file=str(self._files[0]))
            self._complained = False
        except BadSetting as problem:  # also between the change of the one file and that of the other
            if not self._complained:
                log.warning("Could not read the certificate again; the last one stays", problem=str(problem))
            self._complained = True

    def _stat(self) -> list[tuple[int, int, int]]:
        return [_version(variable, path) for variable, path in zip((CERTIFICATE, KEY), self._files, strict=True)]


def _version(variable: str, path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()  # through links: that is how container platforms swap files
    except OSError as error:
        raise _unreadable(variable, path, error) from None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _loaded(certificate: Path, key: Path) -> ssl.SSLContext:
    for variable, path in ((CERTIFICATE, certificate), (KEY, key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise _unreadable(variable, path, error) from None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except ssl.SSLError:
        raise BadSetting(CERTIFICATE, f"there is no certificate in {certificate}: PEM is expected") from None
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _Encrypted:
        raise BadSetting(KEY, f"the key in {key} has a password: it is expected without one") from None
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise BadSetting(KEY, f"the key in {key} is not that of the certificate in {certificate}") from None
        raise BadSetting(KEY, f"{certificate} and {key} cannot be used as a certificate and its key: {error}") from None
    return context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    """In place of OpenSSL's question at the terminal."""
    raise _Encrypted


def _unreadable(variable: str, path: Path, error: OSError) -> BadSetting:
    return BadSetting(variable, f"cannot read {path}: {error.strerror}")


def trusting(ca_file: Path | None) -> ssl.SSLContext:
    """The client's side: whom the authority in a PEM file has signed; without one, the system's authorities."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise BadSetting(CA, f"there is no certificate in {ca_file}: PEM is expected") from None
    except OSError as error:
        raise BadSetting(CA, f"cannot read {ca_file}: {error.strerror}") from None
