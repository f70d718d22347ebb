"""The tables of docs/configuration.md are those that the settings' schema makes."""

import pytest

import configuration_page as tool
from scheduler_page import rewrite

TEXT = tool.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", tool.tables())
def test_the_page_has_every_setting_as_the_schema_has_it(name: str) -> None:
    """A setting that is new or differs makes this fail: `make configuration-page` writes the page anew."""
    assert rewrite(TEXT, {name: tool.tables()[name]}) == TEXT
