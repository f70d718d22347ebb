"""Lines of the log that come from a test's own thread."""

from __future__ import annotations

import logging
import threading

import pytest


def logged_here(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records of this thread only. Threads of earlier tests may still be ending, and may log the same lines."""
    return [record for record in caplog.records if record.thread == threading.get_ident()]
