"""Hooks of mkdocs that put Mermaid, which draws the diagrams, into the documentation's site.

The theme would fetch it from a server of somebody else for every reader. It comes from npm's registry, once, into .browser.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import npm

_PACKAGE, _VERSION = "@mermaid-js/tiny", "11.17.2"
_SCRIPT = Path(__file__).resolve().parents[1] / ".browser" / f"mermaid-{_VERSION}.js"
#: Where the site has the script.
_URI = "assets/mermaid.js"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fetch the script if it is missing, and include it in every page. Raises NpmFailed."""
    if not _SCRIPT.exists():
        _SCRIPT.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_SCRIPT.parent) as made:
            _, command = npm.node(Path(made))
            package = npm.unpack(f"{_PACKAGE}@{_VERSION}", command, Path(made))
            shutil.move(package / "dist" / "mermaid.tiny.js", _SCRIPT)
    config.extra_javascript.append(_URI)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the script to the files of the site."""
    files.append(File.generated(config, _URI, abs_src_path=str(_SCRIPT)))
    return files
