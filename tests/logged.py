"""Lines of the log that a test's own thread has written."""

from __future__ import annotations

import logging
import threading

import pytest


def logged_here(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records of this thread: threads of earlier tests may still end, and log that."""
    return [record for record in caplog.records if record.thread == threading.get_ident()]
