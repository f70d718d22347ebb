"""The health of the server and of each model, and the models that should serve and do not."""

from pathlib import Path

from rsrv.control.grpc_service import HealthService
from rsrv.control.reconciler import Reconciler
from rsrv.control.runtimes import Runtimes
from rsrv_gen.plan import BUNDLE_FOLDER
from rsrv_gen.write import carried, is_alias


class Health(HealthService):
    """The health of a server and of its models.

    The expected models, which should serve, are all models in the repository at the start, and each model that has served since
    the start. A model is no longer expected when it is removed from the repository, or when an operator has unloaded it. So a
    model that fails from the start is expected. A model that is added later is expected once it has been ready.
    """

    def __init__(self, view: Runtimes, repository: Path, lifecycle: Reconciler, *, decides: bool) -> None:
        """`decides` is True if the repository determines which models are served.

        In explicit mode, an external control plane determines which models are served, and only the control plane knows them.
        """
        self._view = view
        self._repository = repository
        self._lifecycle = lifecycle
        self._decides = decides
        self._expected = (
            {folder.parent.parent.name for folder in repository.glob(f"*/{BUNDLE_FOLDER}")}
            if decides
            else set()
        )

    async def run(self) -> None:
        """Record which models become ready, even if no client requests the health. Never returns."""
        while True:
            self.missing()
            await self.changed()

    async def changed(self) -> None:
        """Return after the next change of the models or runtimes. Loads and evictions of weights are not such changes."""
        seen = self._view.other_changes
        while self._view.other_changes == seen:
            await self._view.wait_change()

    def serving(self, service: str) -> bool | None:
        if not service:
            return (self._view.up or self._view.asleep) and not self.missing()
        models = self._targets(service)
        if any(map(self._serves, models)):
            return True
        return False if any(map(self._knows, models)) else None

    def missing(self) -> set[str]:
        """Return the names of the models that should serve and do not."""
        presence = self._view.presence
        if presence.lost:
            presence.forget_lost(self._lifecycle.loading)
        serving = presence.serving - presence.lost
        if self._decides:
            self._expected |= serving
        missing = self._expected - serving
        if not missing:
            return missing
        unwanted = self._lifecycle.unwanted
        forgotten = {name for name in missing if name in unwanted or not self.has(name)}
        self._expected -= forgotten
        return missing - forgotten

    def has(self, name: str) -> bool:
        """Return True if the repository has the model."""
        return Path(name).name == name and (self._repository / name / BUNDLE_FOLDER).exists()

    def _serves(self, name: str) -> bool:
        """Return True if a model can serve.

        A model that has lost its stub serves again only when Triton has finished loading it. Until then, Triton sends requests to
        the dead stub.
        """
        presence = self._view.presence
        if not presence.serves(name):
            return False
        return name not in presence.lost or name not in self._lifecycle.loading

    def _knows(self, name: str) -> bool:
        """Return True if the model exists, ready or not."""
        return (
            self.has(name)
            or name in self._lifecycle.failures
            or any(entry["name"] == name for entry in self._view.entries.values())
        )

    def _targets(self, name: str) -> set[str]:
        """Return the models that answer requests to an alias. For any other name, return the name itself."""
        folder, shares = self._repository / name, self._lifecycle.aliases.get(name, {})
        if Path(name).name != name or not is_alias(folder):
            return {name}
        return {target for target in carried(folder) if shares.get(target, 1) not in (0, "shadow")}
