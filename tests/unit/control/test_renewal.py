"""Files with certificates and tokens that are replaced while a process runs."""

from __future__ import annotations

import errno
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from rsrv.renewal import Renewals, Renewed, end_of

DAY = 86400.0


def issue(folder: Path, ends: datetime, authority: trustme.CA | None = None) -> float:
    """Write a certificate and its key, and return the Unix time at which the certificate ends."""
    issued = (authority or trustme.CA()).issue_cert("localhost", not_after=ends)
    replace(folder / "cert", issued.cert_chain_pems[0].bytes())
    replace(folder / "key", issued.private_key_pem.bytes())
    return ends.timestamp()


def replace(file: Path, content: bytes) -> None:
    """Replace a file by a rename, as renewals do."""
    other = file.with_suffix(".new")
    other.write_bytes(content)
    other.chmod(0o600)
    os.replace(other, file)


def certificate(folder: Path) -> Renewed[str]:
    """Return a `Renewed` certificate. Its value is the content of the file."""
    cert, key = folder / "cert", folder / "key"

    def read() -> str:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
        return cert.read_text()

    return Renewed("gateway.tls_certificate", (cert, key), read, cert)


@given(st.datetimes(datetime(2000, 1, 1), datetime(2120, 1, 1)))
def test_the_end_of_a_certificate(ends: datetime) -> None:
    """The end of a certificate is read from its content. From 2050 on, certificates write dates in another form."""
    ends = ends.replace(microsecond=0, tzinfo=UTC)
    issued = AUTHORITY.issue_cert("localhost", not_after=ends, not_before=datetime(1999, 1, 1, tzinfo=UTC))
    assert end_of(issued.cert_chain_pems[0].bytes()) == ends.timestamp()


AUTHORITY = trustme.CA()


def test_the_first_end_of_a_chain_counts() -> None:
    """A chain ends when the first of its certificates ends. A file without a certificate is an error."""
    early, late = (
        AUTHORITY.issue_cert("localhost", not_after=datetime(year, 1, 1, tzinfo=UTC)).cert_chain_pems[0]
        for year in (2031, 2032)
    )
    assert end_of(late.bytes() + early.bytes()) == datetime(2031, 1, 1, tzinfo=UTC).timestamp()
    for content in (b"", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"):
        with pytest.raises(ValueError, match="certificate"):
            end_of(content)


def test_a_renewed_certificate_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A new certificate is used from the next check on, and the log says when the certificate ends."""
    caplog.set_level("INFO")
    first = issue(tmp_path, datetime(2031, 1, 1, tzinfo=UTC))
    renewed = certificate(tmp_path)
    before = renewed.value
    second = issue(tmp_path, datetime(2032, 1, 1, tzinfo=UTC))
    assert (renewed.value, renewed.ends_at) == (before, first)
    renewed.check(first - 100 * DAY)
    assert renewed.value != before
    assert (renewed.ends_at, renewed.problem) == (second, "")
    assert "gateway.tls_certificate was renewed, until 2032-01-01 00:00 UTC" in caplog.text


def test_a_file_that_cannot_be_used_leaves_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """While a file is broken or missing, does not match its key, or has ended, the last good value is used.

    Each problem is logged once, and is reported as `problem` until the file is good again.
    """
    ends = issue(tmp_path, datetime(2031, 1, 1, tzinfo=UTC))
    now = ends - 100 * DAY
    renewed = certificate(tmp_path)
    good = renewed.value
    certificate_file, key = (tmp_path / name for name in ("cert", "key"))
    content = certificate_file.read_bytes()
    other = trustme.CA().issue_cert("localhost").private_key_pem.bytes()

    def broken() -> None:
        replace(certificate_file, b"broken")

    def missing() -> None:
        certificate_file.unlink()

    def unmatched() -> None:
        replace(certificate_file, content)
        replace(key, other)

    def ended() -> None:
        issue(tmp_path, datetime.fromtimestamp(now - DAY, UTC))

    problems = []
    for change in (broken, missing, unmatched, ended):
        change()
        for _ in range(3):
            renewed.check(now)
        assert renewed.value == good
        problems.append(renewed.problem)
    assert ["PEM" in problems[0], "No such file" in problems[1], "ended on" in problems[3]] == [True] * 3
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 4
    issue(tmp_path, datetime(2033, 1, 1, tzinfo=UTC))
    renewed.check(now)
    assert renewed.problem == ""
    assert renewed.value != good


def test_a_read_that_failed_is_repeated(tmp_path: Path) -> None:
    """If a new file cannot be read for a moment, as without free descriptors, the next check reads it, although it has not changed."""
    path = tmp_path / "token"
    replace(path, b"first")
    failures: list[OSError] = []

    def read() -> bytes:
        if failures:
            raise failures.pop()
        return path.read_bytes()

    renewed = Renewed("gateway.token_file", [path], read)
    replace(path, b"second")
    failures.append(OSError(errno.EMFILE, "Too many open files"))
    renewed.check(0)
    assert (renewed.value, "Too many" in renewed.problem) == (b"first", True)
    renewed.check(0)
    assert (renewed.value, renewed.problem) == (b"second", "")


def test_a_certificate_that_ends_soon_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log announces the end of a certificate once in the last 14 days before it, and once when the certificate has ended."""
    ends = issue(tmp_path, datetime(2031, 1, 1, tzinfo=UTC))
    renewed = certificate(tmp_path)

    def lines(days: float) -> list[str]:
        caplog.clear()
        renewed.check(ends - days * DAY)
        renewed.check(ends - days * DAY + 1)
        return [record.getMessage() for record in caplog.records]

    assert lines(15) == []
    (line,) = lines(13.9)
    assert line.startswith(
        "gateway.tls_certificate: the certificate ends on 2031-01-01 00:00 UTC; replace the file"
    )
    assert lines(3) == []
    (line,) = lines(-1)
    assert line.startswith("gateway.tls_certificate: the certificate has ended on")


def test_a_file_behind_links_is_watched(tmp_path: Path) -> None:
    """A secret is read again if a link to its directory is swapped, as Kubernetes does it."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(name)
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "token").symlink_to("data/token")
    renewals = Renewals()
    token = renewals.of("gateway.token_file", [tmp_path / "token"], (tmp_path / "token").read_text)
    assert token.value == "one"
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "data")
    renewals.check(0.0)
    assert token.value == "two"
