"""Generate the Python stubs of the control services and of the endpoint picker's messages.

`make pages` writes the stubs next to the proto files. An argument names another folder.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Proto files by the folder above their package.
PROTOS = {
    "triton_backend": ["rsrv/control/v1/control.proto"],
    "gateway": [f"rsrv_gateway/v1/{name}.proto" for name in ("gateway", "ext_proc", "infer_head")],
}


def main() -> int:
    status = 0
    for folder, protos in PROTOS.items():
        source = ROOT / folder
        out = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else source
        for proto in protos:
            services = "\nservice " in (source / proto).read_text(encoding="utf-8")
            kinds = ("python", "pyi", "grpc_python") if services else ("python", "pyi")
            flags = [f"--{kind}_out={out}" for kind in kinds]
            # The root is the folder above the packages, so that the stubs import each other by their full names.
            command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *flags, proto]
            status |= subprocess.run(command, check=False, cwd=source).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
