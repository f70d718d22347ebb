"""The tables of docs/configuration.md equal those that are made from the settings' schema."""

import configuration_page as tool
from scheduler_page import rewrite


def test_the_page_has_every_setting_as_the_schema_has_it() -> None:
    """The tables equal the settings' schema; `make pages` writes them."""
    text = tool.PAGE.read_text(encoding="utf-8")
    assert rewrite(text, {"settings": tool.settings()}) == text


def test_the_chart_knows_the_name_of_every_setting() -> None:
    """values.schema.json has the names of the settings' schema; `make pages` writes them."""
    text = tool.CHART_SCHEMA.read_text(encoding="utf-8")
    assert tool.chart_schema(text) == text
