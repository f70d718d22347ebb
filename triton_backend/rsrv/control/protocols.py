"""What the parts of the control process see of the runtime."""

from collections.abc import Mapping
from typing import Literal, Protocol, TypedDict

from rsrv.control.bundle_states import BundleFailure


class ModelVersion(TypedDict):
    """One version of a model, or of a meta model, as the runtime's STATE frames have it (docs/protocol.md)."""

    name: str
    kind: Literal["model", "meta"]
    digest: str
    state: Literal["loading", "ready", "leaving", "failed"]
    error: str | None
    residency: Literal["unpinned", "system", "device"] | None
    weights: Literal["absent", "loading", "resident"] | None
    #: pids of the connected stubs that registered it, or are about to
    stubs: list[int]
    #: keys of what a meta model calls
    models: list[str]
    paused: Literal["drain", "hold", "reject"] | None


class RuntimeView(Protocol):
    """The runtime as it is known to be now. One event loop owns it: nothing changes between two awaits."""

    @property
    def up(self) -> bool:
        """Whether the runtime answers. False while it is dead, stopped, or not there yet."""

    @property
    def since(self) -> float:
        """The event loop's time when this runtime was found. One that was silent for a while is the same."""

    @property
    def entries(self) -> Mapping[str, ModelVersion]:
        """By key. While the runtime is not up, what was known last; a new runtime starts with none."""

    @property
    def changes(self) -> int:
        """Rises by at least 1 with every change of anything else here."""

    def stubs(self) -> Mapping[str, frozenset[int]]:
        """Pids of the connected stubs by name of the model or meta model; of a runtime that is not up, none.

        A name with entries but without stubs is there with an empty set.
        """

    async def wait_change(self, seen: int | None = None) -> None:
        """Return at once if `changes` is not `seen` any more, else after the next change (None: as it is now)."""


class Reloading(Protocol):
    """The lifecycle, as the service sees it."""

    @property
    def failures(self) -> Mapping[str, BundleFailure]:
        """Models that are not as their bundles say, by name."""

    async def reload(self, name: str) -> None:
        """Serve what the bundle holds now. Raises ReloadError; then what was served before is served still."""
