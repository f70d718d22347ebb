"""Certificates, keys and tokens in files. Changed files are read again while the process runs.

If a file cannot be used, or its certificate has ended, the last good content stays in use, and the log has the reason.
"""

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds between two checks of the files.
_CHECK_S = 5.0
#: The log warns this many seconds before a certificate ends.
WARN_S = 14 * 86400.0
_CERTIFICATE = re.compile(b"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _CONTEXT_0 = 0x17, 0xA0


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of renewed files, for operators."""

    #: Name of the setting.
    setting: str
    #: Unix time at which the certificate in use ends. None: there is no certificate.
    ends_at: float | None
    #: Reason why the current files are not in use. Empty if they are in use.
    problem: str


class Renewed(Generic[T]):
    """The content of files. `value` is the last good content. Any thread may read it."""

    def __init__(
        self, setting: str, files: Sequence[Path], read: Callable[[], T], certificate: Path | None = None
    ) -> None:
        """Read the files. Raises the errors of `read`.

        Args:
            setting: Name of the setting, for the log and metrics.
            files: The files.
            read: Returns their content. Its error says why they cannot be used.
            certificate: The file in `files` with the certificate whose end is watched.
        """
        self.setting = setting
        self._files = [file.expanduser() for file in files]
        self._read = read
        self._certificate = None if certificate is None else certificate.expanduser()
        self._state = self._stat()
        self.value = read()
        #: Unix time at which the certificate in use ends. None: there is no certificate.
        self.ends_at = self._end()
        #: Reason why the current files are not in use. Empty if they are in use.
        self.problem = ""
        self._warned = ""

    @property
    def state(self) -> FileState:
        return FileState(self.setting, self.ends_at, self.problem)

    def check(self, now: float) -> None:
        """Read the files if they have changed. `now` is Unix time. Only one thread at a time may call this."""
        state = self._stat()
        if state != self._state:
            self._state = state
            self._renew(now)
        self._warn(now)

    def _renew(self, now: float) -> None:
        try:
            ends_at = self._end()
            if ends_at is not None and ends_at <= now:
                raise ValueError(f"the certificate in {self._certificate} ended on {_day(ends_at)}")
            value = self._read()
        except Exception as error:  # noqa: BLE001  the files may have any fault
            # The cause may also be a short lack of descriptors or memory, so read the files again at the next check.
            self._state = ()
            if str(error) != self.problem:
                self.problem = str(error)
                log.error("%s cannot be renewed, so the last good one stays in use: %s", self.setting, error)
            return
        self.value, self.ends_at, self.problem = value, ends_at, ""
        log.info("%s was renewed%s", self.setting, "" if ends_at is None else f", until {_day(ends_at)}")

    def _warn(self, now: float) -> None:
        """Log once when the certificate in use is about to end, and once when it has ended."""
        if self.ends_at is None or self.ends_at - now > WARN_S:
            self._warned = ""
            return
        verb = "has ended" if self.ends_at <= now else "ends"
        text = f"{self.setting}: the certificate {verb} on {_day(self.ends_at)}"
        if text != self._warned:
            self._warned = text
            log.warning("%s; replace the file: a renewed one is used without a restart", text)

    def _end(self) -> float | None:
        """Return the Unix time of the certificate's end. None: there is no certificate, or its end cannot be read."""
        with suppress(OSError, ValueError):
            return None if self._certificate is None else end_of(self._certificate.read_bytes())
        return None

    def _stat(self) -> tuple[object, ...]:
        states: list[object] = []
        for file in self._files:
            try:
                status = file.stat()
                states.append((status.st_ino, status.st_mtime_ns, status.st_size))
            except OSError:
                states.append(None)
        return tuple(states)


class Renewals:
    """All renewed files of a process. `run` checks them regularly."""

    def __init__(self) -> None:
        self._all: dict[str, Renewed[Any]] = {}

    def of(
        self, setting: str, files: Sequence[Path], read: Callable[[], T], certificate: Path | None = None
    ) -> Renewed[T]:
        """Return the content of these files, which are checked from now on. Each setting has one `Renewed`.

        Arguments and errors are as in `Renewed`.
        """
        renewed = self._all.get(setting)
        if renewed is None:
            renewed = self._all[setting] = Renewed(setting, files, read, certificate)
            renewed.check(time.time())
        return renewed

    def __iter__(self) -> Iterator[Renewed[Any]]:
        return iter(list(self._all.values()))

    def check(self, now: float) -> None:
        """Check all files. `now` is Unix time."""
        for renewed in self:
            renewed.check(now)

    async def run(self) -> None:
        """Check all files regularly, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_S)
            # Use a thread, because a file system may hang.
            await asyncio.to_thread(self.check, time.time())


class RenewedTls(ssl.SSLContext):
    """A context that uses the latest files for new connections. Use it only with asyncio, which calls only `wrap_bio`.

    The other methods of the context do not use the latest files.
    """

    latest: Callable[[], ssl.SSLContext]

    @classmethod
    def of(cls, latest: Callable[[], ssl.SSLContext]) -> "RenewedTls":
        context = cls(latest().protocol)
        context.latest = latest
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.latest().wrap_bio(*args, **options)


def end_of(pem: bytes) -> float:
    """Return the earliest Unix time at which a certificate of a chain ends. Raises ValueError if there is no certificate."""
    ends = [_end(ssl.PEM_cert_to_DER_cert(match[0].decode("ascii"))) for match in _CERTIFICATE.finditer(pem)]
    if not ends:
        raise ValueError("the file has no certificate")
    return min(ends)


def _end(der: bytes) -> float:
    """Return the Unix time of `notAfter` in a certificate (RFC 5280, section 4.1). Raises ValueError."""
    with suppress(IndexError):
        _, at, _ = _element(der, 0)
        _, at, _ = _element(der, at)
        tag, _, end = _element(der, at)
        # Skip the fields before the validity: the optional version, the serial number, the signature's algorithm and the
        # issuer.
        for _ in range(3 if tag == _CONTEXT_0 else 2):
            _, _, end = _element(der, end)
        _, at, _ = _element(der, end)
        _, _, at = _element(der, at)
        tag, at, end = _element(der, at)
        text = der[at:end].decode("ascii")
        if tag == _UTC_TIME:
            text = f"{'19' if text[:2] >= '50' else '20'}{text}"
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    raise ValueError("the certificate has no end")


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the element at this offset, and the start and end of its content."""
    size, start = der[at + 1], at + 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[at + 2 : start], "big")
    return der[at], start, start + size


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
