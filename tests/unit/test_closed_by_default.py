"""By default, every port listens for this machine only."""

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from rsrv.address import Address, parse_address
from rsrv.cli.main import parser
from rsrv.settings import Settings, load_settings
from rsrv_gateway.__main__ import parser as gateway_parser

ENVOY = Path(__file__).resolve().parents[2] / "deploy" / "envoy.yaml"


def default_addresses() -> dict[str, Address]:
    """Return the default address of each setting, command and example that has one."""
    addresses: dict[str, Address] = {}
    settings = load_settings()
    for section in Settings.model_fields:
        values = getattr(settings, section)
        for key, value in values if isinstance(values, BaseModel) else ():
            try:
                addresses[f"{section}.{key}"] = parse_address(str(value), any_host=True)
            except ValueError:
                continue
    (picker,) = gateway_parser().parse(["--picker"]).picker.split()
    addresses["rsrv-gateway --picker"] = parse_address(picker)
    addresses["rsrv serve"] = Address(parser().parse(["serve", "bundles"]).host, 8000)
    listener = yaml.safe_load(ENVOY.read_text())["static_resources"]["listeners"][0]["address"]
    addresses["deploy/envoy.yaml"] = Address(listener["socket_address"]["address"], 8080)
    return addresses


@pytest.mark.parametrize("where", default_addresses())
def test_an_address_is_of_this_machine_only(where: str) -> None:
    """By default, a port is open for this machine only, because clients of Triton can take over a server."""
    assert default_addresses()[where].is_loopback


def test_these_are_the_addresses() -> None:
    """The tests recognise addresses among the settings by their form, so new ones are also tested. Some known ones are found."""
    assert {"gateway.grpc", "gateway.http", "gateway.admin", "metrics.listen"} <= default_addresses().keys()
