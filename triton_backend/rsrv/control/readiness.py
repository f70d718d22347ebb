"""Which models can serve now, and whether those are all that should."""

from pathlib import Path

from rsrv.control.view import RuntimeView
from rsrv_gen.plan import BUNDLE_FOLDER


class Readiness:
    """What should serve is what the repository held at the start, and whatever has been ready since, for as long as the
    repository has it. So a model that is added counts once it is ready, and one that fails from the start counts.

    `decides`: whether the repository says what is served; false in explicit mode, where only an external control plane
    knows.
    """

    def __init__(self, view: RuntimeView, repository: Path, *, decides: bool) -> None:
        self._view = view
        self._repository = repository
        self._decides = decides
        self._expected = (
            {found.parent.parent.name for found in repository.glob(f"*/{BUNDLE_FOLDER}")}
            if decides
            else set()
        )

    def ready(self) -> set[str]:
        """Names of the models and meta models that have a ready version and a live stub, be it a meta model's that
        calls them.
        """
        if not self._view.up:
            return set()
        entries = self._view.entries
        served = {
            key: entry for key, entry in entries.items() if entry["state"] == "ready" and entry["stubs"]
        }
        called = {key for entry in served.values() for key in entry["models"] if key in entries}
        return {entries[key]["name"] for key in (*served, *called) if entries[key]["state"] == "ready"}

    def knows(self, name: str) -> bool:
        """Whether there is such a model, ready or not."""
        return self._has(name) or any(entry["name"] == name for entry in self._view.entries.values())

    def missing(self) -> set[str]:
        """Names of those that should serve and do not. To be asked after every change of the view."""
        ready = self.ready()
        if self._decides:
            self._expected |= ready
        missing = self._expected - ready
        gone = {name for name in missing if not self._has(name)}
        self._expected -= gone
        return missing - gone

    def _has(self, name: str) -> bool:
        return Path(name).name == name and (self._repository / name / BUNDLE_FOLDER).exists()
