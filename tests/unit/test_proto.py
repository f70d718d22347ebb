"""The checked-in gRPC stubs match the .proto files."""

import subprocess
import sys
from pathlib import Path

from rsrv.control.v1 import control_pb2
from rsrv_gateway.v1 import gateway_pb2

ROOT = Path(__file__).resolve().parents[2]


def test_the_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    """The stubs equal those that are generated from the .proto files. `make pages` writes them."""
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "make_proto.py"), str(tmp_path)], check=True, timeout=60
    )
    for module, package in ((control_pb2, "rsrv/control/v1"), (gateway_pb2, "rsrv_gateway/v1")):
        generated = {path.name: path.read_text() for path in (tmp_path / package).iterdir() if path.is_file()}
        folder = Path(str(module.__file__)).parent
        assert {path.name: path.read_text() for path in folder.glob("*_pb2*")} == generated
