"""`python -m rsrv.gpu OPTIONS`: run the parts one after the other, each in a process of its own, and print what they find.

`rsrv gpu first-hour` starts it with the interpreter of the runtime. OPTIONS is a JSON object with its options.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from rsrv.command import put
from rsrv.gpu import processes
from rsrv.gpu.report import PARTS, QUICK, Amounts, DeviceFacts, Finding, PartInput, document, table_line
from rsrv.serve import demo
from rsrv.text import amount, duration, os_error

#: seconds to describe the device
_DESCRIBE_S = 120.0


def main(argv: list[str]) -> int:
    """Return 0, or 1 if anything failed."""
    options = json.loads(argv[0])
    try:
        bundles = _bundles([Path(path) for path in options["bundles"]] or [demo.DATA / demo.BUNDLES])
        if options["json"]:
            Path(options["json"]).open("a").close()
    except OSError as error:
        put(f"rsrv gpu first-hour: {os_error(error)}", sys.stderr)
        return 1
    started = time.monotonic()
    # Settings of a server would replace those that a part measures.
    environment = {
        key: value for key, value in os.environ.items() if not ("__" in key and key.startswith("RSRV_"))
    }
    with tempfile.TemporaryDirectory(prefix="rsrv-first-hour-") as temporary:
        folder = Path(temporary)
        platform = "cpu" if options["cpu"] else "cuda"
        device, *_ = processes.run(folder, _DESCRIBE_S, processes.describe, platform)
        if not isinstance(device, DeviceFacts):
            put(f"rsrv gpu first-hour: {device.reason}", sys.stderr)
            return 1
        put(f"{device.name} ({device.platform}), {amount(device.memory)}, {device.versions}")
        amounts = QUICK if options["quick"] or options["cpu"] else Amounts()
        findings: dict[str, list[Finding]] = {}
        seconds: dict[str, float] = {}
        for name in options["parts"] or PARTS:
            findings[name], began = [], time.monotonic()
            own = folder / name
            own.mkdir()
            given = PartInput(device, amounts, bundles, own, environment)
            for finding in processes.run(own, PARTS[name].limit_s, processes.run_part, PARTS[name], given):
                findings[name].append(finding)
                put(table_line(name, finding))
            seconds[name] = time.monotonic() - began
            if options["json"]:
                text = json.dumps(document(device, findings, seconds), indent=1)
                Path(options["json"]).write_text(f"{text}\n")
    verdicts = [finding.verdict for part in findings.values() for finding in part]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts)))
    put(f"{counts}; {duration(time.monotonic() - started)}")
    return int("FAIL" in verdicts)


def _bundles(paths: list[Path]) -> list[Path]:
    """Return the bundles among these and in these folders. Raises OSError."""
    found = [bundle for path in paths for bundle in ([path] if _is_bundle(path) else sorted(path.iterdir()))]
    if found := [path.absolute() for path in found if _is_bundle(path)]:
        return found
    raise OSError(f"{', '.join(map(str, paths))}: no bundles. Name bundles, or folders of bundles")


def _is_bundle(path: Path) -> bool:
    return (path / "manifest.yaml").is_file()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
