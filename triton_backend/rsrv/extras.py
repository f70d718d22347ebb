"""Commands that install rsrv's extras. Messages about a missing package contain them."""

import json
from typing import Any
from urllib.parse import unquote


def install_command(*extras: str) -> str:
    """Return the command that installs `extras` from the source of this rsrv: a folder, a wheel, Git or an index."""
    selection = f"[{','.join(extras)}]"
    origin = _origin()
    url: str = origin.get("url", "")
    if url.startswith("file://"):
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}'{unquote(url.removeprefix('file://'))}{selection}'"
    if git := origin.get("vcs_info"):
        url = f"{git['vcs']}+{url}@{git['commit_id']}"
    return f"pip install 'rsrv{selection}{url and f' @ {url}'}'"


def _origin() -> dict[str, Any]:
    """Return pip's record of the source of rsrv (PEP 610). It is empty if rsrv came from an index."""
    # Import this module only when a message needs it, because commands start faster without it.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin: dict[str, Any] = json.loads(distribution("rsrv").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return origin
