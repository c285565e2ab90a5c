"""TLS of the sidecar: certificates that are wrong or rotate."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from tests.fix_tls import Authority, Pem
from tidemark.app.serving.tls_listener import Certificate, client_tls_context
from tidemark.app.stack.processes import LOOPBACK
from tidemark.common.errors import BadSetting


@pytest.fixture
def pem(authority: Authority, tmp_path: Path) -> Pem:
    """Of this machine, in files of the test's own."""
    issued = authority.issue(LOOPBACK)
    return Pem(*(Path(shutil.copy(path, tmp_path)) for path in (issued.certificate, issued.key, issued.both)))


def _missing(pem: Pem) -> None:
    pem.certificate.unlink()


def _no_key(pem: Pem) -> None:
    pem.key.unlink()


def _a_folder(pem: Pem) -> None:
    pem.key.unlink()
    pem.key.mkdir()


def _no_certificate(pem: Pem) -> None:
    pem.certificate.write_text("hello")


def _no_pem(pem: Pem) -> None:
    pem.key.write_text("")


def _swapped(pem: Pem) -> None:
    certificate, key = pem.certificate.read_bytes(), pem.key.read_bytes()
    pem.certificate.write_bytes(key)
    pem.key.write_bytes(certificate)


def _with_password(pem: Pem) -> None:
    key = load_pem_private_key(pem.key.read_bytes(), None)
    pem.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_missing, r"TIDEMARK_SIDECAR_CERTIFICATE_FILE: cannot read .*: No such file"),
        (_no_key, r"TIDEMARK_SIDECAR_KEY_FILE: cannot read .*: No such file"),
        (_a_folder, r"TIDEMARK_SIDECAR_KEY_FILE: cannot read .*: Is a directory"),
        (_no_certificate, r"TIDEMARK_SIDECAR_CERTIFICATE_FILE: .* contains no certificate"),
        (_no_pem, r"TIDEMARK_SIDECAR_KEY_FILE: .* cannot be used"),
        (_swapped, r"TIDEMARK_SIDECAR_CERTIFICATE_FILE: .* contains no certificate"),
        (_with_password, r"TIDEMARK_SIDECAR_KEY_FILE: the key in .* has a password"),
    ],
)
def test_files_that_cannot_be_used_are_told_by_their_setting(pem: Pem, spoil: Callable[[Pem], None], said: str) -> None:
    """At the start, in one line, and without a question at the terminal."""
    spoil(pem)
    with pytest.raises(BadSetting, match=said) as problem:
        Certificate(pem.certificate, pem.key)
    assert "\n" not in str(problem.value)


def test_the_key_of_another_certificate_is_told(pem: Pem, stranger: Authority) -> None:
    """By the setting of the key, with both files."""
    with pytest.raises(
        BadSetting, match=r"TIDEMARK_SIDECAR_KEY_FILE: the key in .* does not belong to the certificate"
    ):
        Certificate(pem.certificate, stranger.issue(LOOPBACK).key)


def test_a_pair_that_rotates_is_taken_up_whole(pem: Pem, authority: Authority) -> None:
    """While only one file is new, or a file is away, the last pair stays; once a second is enough to look."""
    clock = [0.0]
    certificate = Certificate(pem.certificate, pem.key, lambda: clock[0])
    first = certificate.context()
    new = authority.issue("localhost")
    pem.certificate.write_bytes(new.certificate.read_bytes())
    assert certificate.context() is first
    clock[0] = 1
    assert certificate.context() is first
    pem.key.unlink()
    clock[0] = 2
    assert certificate.context() is first
    pem.key.write_bytes(new.key.read_bytes())
    clock[0] = 2.5
    assert certificate.context() is first
    clock[0] = 3
    assert certificate.context() is not first


def test_an_authority_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    """By its setting."""
    with pytest.raises(BadSetting, match=r"TIDEMARK_SIDECAR_CA_FILE: cannot read .*nowhere: No such file"):
        client_tls_context(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(BadSetting, match=r"TIDEMARK_SIDECAR_CA_FILE: .* contains no certificate"):
        client_tls_context(tmp_path / "empty")
