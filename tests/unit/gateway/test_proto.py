"""The checked-in stubs are those of gateway.proto, and numbers stay."""

import re
import subprocess
import sys
from pathlib import Path

import rsrv_gateway.v1
from rsrv_gateway.v1 import gateway_pb2

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(rsrv_gateway.v1.__path__[0])


def test_the_stubs_are_those_of_the_proto(tmp_path: Path) -> None:
    """Whoever changes gateway.proto runs make pages."""
    command = [sys.executable, str(ROOT / "tools" / "make_proto.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    for name in ("gateway_pb2.py", "gateway_pb2.pyi", "gateway_pb2_grpc.py"):
        assert (FOLDER / name).read_text() == (tmp_path / "rsrv_gateway" / "v1" / name).read_text()


def test_every_field_has_a_number_of_its_own_forever() -> None:
    """Numbers begin at 1 without gaps: one that was used once must be named as reserved, not forgotten."""
    for message in gateway_pb2.DESCRIPTOR.message_types_by_name.values():
        numbers = sorted(field.number for field in message.fields)
        assert numbers == list(range(1, len(numbers) + 1)), message.name


def test_every_call_is_in_the_docs() -> None:
    """docs/gateway.md has a row for each."""
    rows = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "gateway.md").read_text(), re.MULTILINE))

    assert {method.name for method in gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].methods} <= rows
