"""Bundles, waiting and examples that tests of several packages share."""

from __future__ import annotations

from hypothesis import settings

_default = settings.default
assert _default is not None
#: for properties whose every example is slow; `make test-long` takes ten times as many
FEW_EXAMPLES = settings(max_examples=_default.max_examples // 3)
