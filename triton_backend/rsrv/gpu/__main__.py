"""`python -m rsrv.gpu OPTIONS`: run the parts one after the other, each in a separate process, and print their findings.

`rsrv gpu check` runs this module with the interpreter of the runtime. OPTIONS is a JSON object with the options of that command.
"""

import ctypes
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rsrv.command import put
from rsrv.gpu import processes
from rsrv.gpu.report import (
    PARTS,
    QUICK,
    Amounts,
    DeviceFacts,
    Finding,
    PartInput,
    document,
    ends_of,
    heading,
    summary,
    table_row,
    too_late,
)
from rsrv.serve import demo
from rsrv.serve.exec_bound import PR_SET_PDEATHSIG
from rsrv.text import duration, os_error

#: Longest time that the description of the device may take, in seconds.
_DESCRIBE_S = 120.0


def main(argv: list[str]) -> int:
    """Run the parts and print their findings. Return 0, or 1 if anything failed."""
    options = json.loads(argv[0])
    file = Path(options["json"]) if options["json"] else None
    models = Path(options["models"]).absolute() if options["models"] else None
    try:
        bundles = _bundles([Path(path) for path in options["bundles"]] or [demo.DATA / demo.BUNDLES])
        if file is not None:
            file.open("a").close()
    except OSError as error:
        put(f"rsrv gpu check: {os_error(error)}", sys.stderr)
        return 1
    began = time.monotonic()
    environment = processes.without_settings()
    with tempfile.TemporaryDirectory(prefix="rsrv-gpu-check-") as temporary:
        folder = Path(temporary)
        platform = "cpu" if options["cpu"] else "cuda"
        device, *_ = processes.run(_own(folder, "device"), _DESCRIBE_S, processes.describe, platform)
        if not isinstance(device, DeviceFacts):
            put(f"rsrv gpu check: {device.reason}", sys.stderr)
            return 1
        amounts = QUICK if options["quick"] or options["cpu"] else Amounts()
        names = options["parts"] or list(PARTS)
        with _table(device, file) as table:
            for name, end in ends_of(names, options["minutes"] * 60).items():
                part, ends_at = PARTS[name], began + end
                left = ends_at - time.monotonic()
                if (finding := too_late(part, left)) is not None:
                    table.add(name, finding)
                    continue
                put(f"rsrv gpu check: {name}, at most {duration(left)}", sys.stderr)
                own, started = _own(folder, name), time.monotonic()
                part_input = PartInput(device, amounts, bundles, models, own, environment, ends_at)
                with closing(processes.run(own, left, processes.run_part, part, part_input)) as findings:
                    for finding in findings:
                        table.add(name, finding)
                table.end(name, time.monotonic() - started)
    everything = [finding for of_part in table.findings.values() for finding in of_part]
    put(summary(everything, time.monotonic() - began), sys.stderr)
    return int(any(finding.verdict == "FAIL" for finding in everything))


@dataclass(slots=True)
class Table:
    """The findings so far.

    Each finding is written to the file at once. It is printed as a row when another finding follows or its part ends.
    """

    device: DeviceFacts
    file: Path | None
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    #: The row that is not printed yet, because the next finding may replace it.
    _row: str = ""

    def add(self, part: str, finding: Finding) -> None:
        of_part = self.findings.setdefault(part, [])
        if not of_part or of_part[-1].what != finding.what:
            self.print_row()
        of_part[:] = [earlier for earlier in of_part if earlier.what != finding.what]
        of_part.append(finding)
        self._row = table_row(part, finding)
        self._write()

    def end(self, part: str, seconds: float) -> None:
        self.seconds[part] = seconds
        self.findings.setdefault(part, [])
        self.print_row()
        self._write()

    def print_row(self) -> None:
        if self._row:
            put(self._row)
        self._row = ""

    def _write(self) -> None:
        if self.file is not None:
            # Replace the file in one step, so that readers see a complete document even after a run that was cut off.
            aside = self.file.with_name(f"{self.file.name}.new")
            text = json.dumps(document(self.device, self.findings, self.seconds), indent=1)
            aside.write_text(f"{text}\n")
            aside.replace(self.file)


@contextmanager
def _table(device: DeviceFacts, file: Path | None) -> Iterator[Table]:
    """Print the table's heading, and yield the table. When the block ends, print the last row, even after an error."""
    put(heading(device))
    table = Table(device, file)
    try:
        yield table
    finally:
        table.print_row()


def _own(folder: Path, name: str) -> Path:
    (own := folder / name).mkdir()
    return own


def _bundles(paths: list[Path]) -> list[Path]:
    """Return these bundles. A path that is not a bundle is a folder: return the bundles in it. Raises OSError."""
    among = [bundle for path in paths for bundle in ([path] if _is_bundle(path) else sorted(path.iterdir()))]
    if bundles := [path.absolute() for path in among if _is_bundle(path)]:
        return bundles
    raise OSError(f"{', '.join(map(str, paths))}: no bundles found. Name bundles, or folders of bundles")


def _is_bundle(path: Path) -> bool:
    return (path / "manifest.yaml").is_file()


def _end(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    # If this process gets SIGTERM or its parent ends, raise SystemExit, so that the parts also end.
    signal.signal(signal.SIGTERM, _end)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
