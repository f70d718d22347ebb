"""Interfaces between the parts of the control process: the versions of models, and the reconciler."""

from collections.abc import Collection, Mapping
from typing import Literal, Protocol, TypedDict

from rsrv.control.bundle_states import BundleFailure
from rsrv.settings import Shares


class ModelVersion(TypedDict):
    """One version of a model, or of a meta model, as the runtime's STATE frames have it (`rsrv.runtime.catalog`)."""

    name: str
    kind: Literal["model", "meta"]
    digest: str
    #: In a frame, "cold" means that the runtime has asked the version's stubs to leave. `DevicePresence` changes it to
    #: "leaving".
    state: Literal["loading", "ready", "leaving", "failed", "cold"]
    error: str | None
    residency: Literal["unpinned", "system", "device"] | None
    weights: Literal["absent", "loading", "resident"] | None
    #: Pids of the connected stubs that have registered the version, or are registering it.
    stubs: list[int]
    #: Keys of the models that a meta model calls.
    models: list[str]
    paused: Literal["drain", "hold", "reject"] | None


class Reconciling(Protocol):
    """The interface of the reconciler for other parts of the control process."""

    @property
    def reached(self) -> bool:
        """True once Triton has loaded its first models, or cannot be reached."""

    @property
    def failures(self) -> Mapping[str, BundleFailure]:
        """Models that differ from their bundles, by name, with the reasons."""

    def bundle_state(self, name: str) -> str:
        """Return the state of a model's bundle by its own name."""

    @property
    def loading(self) -> Collection[str]:
        """Models that Triton is loading or unloading."""

    @property
    def barred(self) -> str:
        """Reason why no model can be loaded or unloaded. Empty if models can be."""

    @property
    def load_threads(self) -> int:
        """Number of models that Triton loads at a time."""

    @property
    def unwanted(self) -> Collection[str]:
        """Models that need not serve although the repository has them."""

    @property
    def process_ends(self) -> Mapping[str, int]:
        """Number of times that the process of a model in Triton was found dead, by model."""

    @property
    def aliases(self) -> Mapping[str, Shares]:
        """Aliases that should be served, with their shares."""

    def follow_aliases(self, aliases: Mapping[str, Shares]) -> None:
        """Serve these aliases from now on."""

    async def change_alias(self, name: str, shares: Shares | None) -> None:
        """Serve an alias with these shares, or stop serving it. After a ReloadError, nothing has changed."""

    async def reload(self, name: str) -> None:
        """Serve the bundle in its present form. After a ReloadError, the previous version still serves."""
