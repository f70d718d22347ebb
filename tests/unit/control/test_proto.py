"""The checked-in stubs are those of control.proto, and the docs have every call of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rsrv.control.v1
from rsrv.control.v1 import control_pb2

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(rsrv.control.v1.__path__[0])


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what `make pages` would write."""
    out = tmp_path_factory.mktemp("proto")
    command = [sys.executable, str(ROOT / "tools" / "make_proto.py"), str(out)]
    subprocess.run(command, check=True, timeout=60)
    return out / "rsrv" / "control" / "v1"


@pytest.mark.parametrize("name", ["control_pb2.py", "control_pb2.pyi", "control_pb2_grpc.py"])
def test_the_stubs_are_those_of_the_proto(generated: Path, name: str) -> None:
    """Whoever changes control.proto runs make pages."""
    assert (FOLDER / name).read_text() == (generated / name).read_text()


def test_every_field_has_a_number_of_its_own_forever() -> None:
    """Numbers begin at 1 without gaps: one that was used once must be named as reserved, not forgotten."""
    for message in control_pb2.DESCRIPTOR.message_types_by_name.values():
        numbers = sorted(field.number for field in message.fields)
        assert numbers == list(range(1, len(numbers) + 1)), message.name


def test_every_call_is_in_the_docs() -> None:
    """docs/control.md has a row for each."""
    text = (ROOT / "docs" / "control.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))

    assert {method.name for method in control_pb2.DESCRIPTOR.services_by_name["Control"].methods} <= rows
