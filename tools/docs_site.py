"""Hooks of mkdocs for the documentation's site. They add Mermaid, which draws the diagrams, and the page of the changelog.

The theme would make every reader's browser fetch Mermaid from a third party's server. Instead, these hooks fetch Mermaid once
from npm's registry into .browser, and add it to the site.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import npm

_PACKAGE, _VERSION = "@mermaid-js/tiny", "11.17.2"
_ROOT = Path(__file__).resolve().parents[1]
_SCRIPT = _ROOT / ".browser" / f"mermaid-{_VERSION}.js"
#: Path of the script in the site.
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


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put CHANGELOG.md into its page. Change its links, which are relative to the repository's root, to links in the site."""
    if page.file.src_uri != "changelog.md":
        return markdown
    return (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
