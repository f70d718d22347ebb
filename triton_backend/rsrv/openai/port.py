"""Whether a server needs OpenAI's endpoints, and whether their port may open."""

import os
from pathlib import Path
from typing import Final

from rsrv.address import parse_address
from rsrv.openai.keys import KeysError, read_keys
from rsrv_gen.config import TASK
from rsrv_gen.plan import CONFIG_FILE

#: Variable with the header and the key of a restricted repository API, as NAME=KEY.
OPERATOR: Final = "RSRV_OPENAI_OPERATOR"
_PARAMETER = f'key: "{TASK}"'.encode()


def closed_reason(listen: str, keys_file: Path | None) -> str:
    """Return why a port must stay closed, or an empty text if it may open.

    Only a file of keys may open a port that other machines can reach.
    """
    try:
        if keys_file is not None:
            read_keys(keys_file)
        elif not parse_address(listen, any_host=True, any_port=True).is_loopback:
            return f"other machines reach {listen}, so callers need keys, and there is no file of keys"
    except (KeysError, ValueError) as error:
        return str(error)
    return ""


class TaskScanner:
    """Scans a repository for models with a task. Each configuration is read once, and again when it changes."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        #: For each path, the modification time of the configuration, and whether it has a task.
        self._known: dict[str, tuple[int, bool]] = {}

    def found(self) -> bool:
        """Look for models with a task. Return True if there is one."""
        known, self._known = self._known, {}
        for folder in os.scandir(self._repository):
            path = f"{folder.path}/{CONFIG_FILE}"
            try:
                time = os.stat(path).st_mtime_ns
                if (seen := known.get(path)) is None or seen[0] != time:
                    seen = time, _PARAMETER in Path(path).read_bytes()
            except OSError:
                # The folder is not a model, or it is being replaced.
                continue
            self._known[path] = seen
        return any(has_task for _, has_task in self._known.values())
