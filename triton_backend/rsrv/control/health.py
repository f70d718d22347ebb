"""The models that can serve now, and the resulting health of the server and of each model."""

from pathlib import Path

from rsrv.control.grpc_service import HealthService
from rsrv.control.protocols import Reconciling
from rsrv.control.runtimes import Runtimes
from rsrv_gen.plan import BUNDLE_FOLDER
from rsrv_gen.write import carried, is_alias


class Readiness:
    """The models that can serve, and those that should.

    The models that should serve are those of the repository at the start, and each one that has been ready since, for as
    long as the repository has it and no operator has unloaded it. So an added model counts once it is ready, and a model
    that fails from the start counts.

    `decides`: True if the repository determines which models are served. In explicit mode, an external control plane
    does, and only it knows them.
    """

    def __init__(self, view: Runtimes, repository: Path, lifecycle: Reconciling, *, decides: bool) -> None:
        self._view = view
        self._repository = repository
        self._lifecycle = lifecycle
        self._decides = decides
        self._expected = (
            {found.parent.parent.name for found in repository.glob(f"*/{BUNDLE_FOLDER}")}
            if decides
            else set()
        )
        #: Names of the models that the view showed as ready, at its count of changes.
        self._seen = -1
        self._shown: set[str] = set()
        #: Models that were cold when last checked. They accept requests, which wait.
        self._cold: set[str] = set()
        #: Cold models that started since. They accept requests, which wait.
        self._starting: set[str] = set()
        #: Models that were ready when last checked.
        self._ready: set[str] = set()
        #: Models that stopped being ready before that.
        self._lost: set[str] = set()

    def ready(self) -> set[str]:
        """Return the names of the models and meta models that can serve. Call it after every change of the view.

        Such a model has a ready version with a stub, or one that the runtime keeps without a stub. Or it is cold or
        starting. A model that
        lost its stub is ready when Triton has loaded it: before, requests go to the dead stub.
        """
        if self._seen != self._view.other_changes:
            self._seen, self._shown = self._view.other_changes, self._served()
        elif not self._lost:
            return self._ready  # the same as before
        served = self._shown
        if self._view.up:  # otherwise, the runtime does not answer, but the stubs may be alive
            self._lost |= self._ready - served
        self._lost &= set(self._lifecycle.loading) | (self._lost - served)
        self._ready = served - self._lost
        return self._ready

    def _served(self) -> set[str]:
        if not (self._view.up or self._view.asleep):
            return set()
        entries = self._view.entries.values()
        ready = {entry["name"] for entry in entries if entry["state"] == "ready"}
        loading = {entry["name"] for entry in entries if entry["state"] == "loading"}
        self._starting, self._cold = loading & (self._starting | self._cold), set(self._view.cold)
        return ready | self._cold | self._starting

    def knows(self, name: str) -> bool:
        """Return True if the model exists, ready or not."""
        return (
            self.has(name)
            or name in self._lifecycle.failures
            or any(entry["name"] == name for entry in self._view.entries.values())
        )

    def targets(self, name: str) -> set[str]:
        """Return the models that answer for an alias; for any other name, that name."""
        folder, shares = self._repository / name, self._lifecycle.aliases.get(name, {})
        if Path(name).name != name or not is_alias(folder):
            return {name}
        return {one for one in carried(folder) if shares.get(one, 1) not in (0, "shadow")}

    def missing(self) -> set[str]:
        """Return the names of the models that should serve and do not. Call it after every change of the view."""
        ready = self.ready()
        if self._decides:
            self._expected |= ready
        missing = self._expected - ready
        unwanted = self._lifecycle.unwanted
        gone = {name for name in missing if name in unwanted or not self.has(name)}
        self._expected -= gone
        return missing - gone

    def has(self, name: str) -> bool:
        """Return True if the repository has the model."""
        return Path(name).name == name and (self._repository / name / BUNDLE_FOLDER).exists()


class Health(HealthService):
    """The health of a server and of its models."""

    def __init__(self, view: Runtimes, readiness: Readiness) -> None:
        self._view = view
        self._readiness = readiness

    async def run(self) -> None:
        """Record the models that become ready, even if no client asks. Never returns."""
        while True:
            self._readiness.missing()
            await self.changed()

    async def changed(self) -> None:
        """Return after the next change that is more than a move of weights."""
        seen = self._view.other_changes
        while self._view.other_changes == seen:
            await self._view.wait_change()

    def serving(self, service: str) -> bool | None:
        if not service:
            return (self._view.up or self._view.asleep) and not self._readiness.missing()
        models = self._readiness.targets(service)
        if not models.isdisjoint(self._readiness.ready()):
            return True
        return False if any(map(self._readiness.knows, models)) else None
