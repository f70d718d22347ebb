"""Which models can serve now, and whether those are all that should."""

from collections.abc import Callable, Collection
from pathlib import Path

from rsrv.control.protocols import RuntimeView
from rsrv_gen.plan import BUNDLE_FOLDER


class Readiness:
    """What should serve is what the repository held at the start, and whatever has been ready since, for as long as the
    repository has it and nobody has unloaded it. So a model that is added counts once it is ready, and one that fails from the start
    counts.

    `loading`: names of the models that Triton is loading; `unwanted`: of those that need not serve although the
    repository has them; `decides`: whether the repository says what is served, as it
    does unless an external control plane decides (explicit mode), and nobody but that knows.
    """

    def __init__(
        self,
        view: RuntimeView,
        repository: Path,
        loading: Callable[[], Collection[str]],
        unwanted: Callable[[], Collection[str]],
        *,
        decides: bool,
    ) -> None:
        self._view = view
        self._repository = repository
        self._loading = loading
        self._unwanted = unwanted
        self._decides = decides
        self._expected = (
            {found.parent.parent.name for found in repository.glob(f"*/{BUNDLE_FOLDER}")}
            if decides
            else set()
        )
        #: names of those that were ready when that was asked last, and of those that were before and are not since
        self._ready: set[str] = set()
        self._lost: set[str] = set()

    def ready(self) -> set[str]:
        """Names of the models and meta models that can serve: they have a ready version and a live stub, be it that of a
        meta model which calls them. To be asked after every change of the view.

        What lost its stub is ready when Triton has loaded it: before, requests go to the dead one.
        """
        served = self._served()
        if self._view.up:  # else the runtime is out of sight, and the stubs need not be gone
            self._lost |= self._ready - served
        self._lost &= set(self._loading()) | (self._lost - served)
        self._ready = served - self._lost
        return self._ready

    def _served(self) -> set[str]:
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
        unwanted = self._unwanted()
        gone = {name for name in missing if name in unwanted or not self._has(name)}
        self._expected -= gone
        return missing - gone

    def _has(self, name: str) -> bool:
        return Path(name).name == name and (self._repository / name / BUNDLE_FOLDER).exists()
