"""Generate the Python stubs of control.proto anew: `make proto`, or into another folder that is given."""

import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "triton_backend"
PROTO = "rsrv/control/v1/control.proto"


def main() -> int:
    out = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else SOURCES
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    # With the folder above the packages as root, so that the stubs import each other by their full names.
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *flags, PROTO]
    return subprocess.run(command, check=False, cwd=SOURCES).returncode


if __name__ == "__main__":
    sys.exit(main())
