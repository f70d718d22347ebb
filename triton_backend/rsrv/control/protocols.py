"""Interfaces between the parts of the control process: the view of the runtime, and reloads."""

from collections.abc import Collection, Mapping
from typing import Literal, Protocol, TypedDict

from rsrv.control.bundle_states import BundleFailure
from rsrv.settings import Shares


class ModelVersion(TypedDict):
    """One version of a model, or of a meta model, as the runtime's STATE frames have it (docs/protocol.md)."""

    name: str
    kind: Literal["model", "meta"]
    digest: str
    state: Literal["loading", "ready", "leaving", "failed"]
    error: str | None
    residency: Literal["unpinned", "system", "device"] | None
    weights: Literal["absent", "loading", "resident"] | None
    #: Pids of the connected stubs that registered it, or are about to.
    stubs: list[int]
    #: Keys of the models that a meta model calls.
    models: list[str]
    paused: Literal["drain", "hold", "reject"] | None


def moves_only(before: ModelVersion | None, after: ModelVersion | None) -> bool:
    """Return True if only the state of a version's weights changed."""
    return (
        before is not None and after is not None and {**before, "weights": None} == {**after, "weights": None}
    )


class RuntimeView(Protocol):
    """The latest known state of the runtime. One event loop owns it: it does not change between two awaits."""

    @property
    def up(self) -> bool:
        """True if the runtime answers; False while it is dead, stopped, or not started."""

    @property
    def asleep(self) -> bool:
        """True if no runtime answers, because devices sleep: their models serve as soon as requests come."""

    @property
    def since(self) -> float:
        """The event loop's time at which this runtime was found. A runtime that was silent for a while is the same one."""

    @property
    def entries(self) -> Mapping[str, ModelVersion]:
        """Versions by key. While the runtime is down, the last known ones; a new runtime starts without any."""

    @property
    def cold(self) -> Collection[str]:
        """Names of the models that no runtime has, and that start with their next request."""

    @property
    def changes(self) -> int:
        """A counter that rises with each change of any other property."""

    @property
    def other_changes(self) -> int:
        """The same without the moves of weights, which are many."""

    def served(self) -> set[str]:
        """Return the names of the models and meta models with a connected stub; none while the runtime is down."""

    def show_cold(self, names: Collection[str]) -> None:
        """Note the models whose stubs live without a connection: they are cold, unless a runtime is about to have them."""

    async def wait_change(self, seen: int | None = None) -> None:
        """Return at once if `changes` is not `seen` any more, else after the next change (None: as it is now)."""


class Reloading(Protocol):
    """The reconciler, as the service uses it."""

    @property
    def failures(self) -> Mapping[str, BundleFailure]:
        """Models that are not as their bundles say, by name."""

    @property
    def aliases(self) -> Mapping[str, Shares]:
        """Aliases that shall serve, with their shares."""

    def follow_aliases(self, aliases: Mapping[str, Shares]) -> None:
        """Serve these aliases from now on."""

    async def change_alias(self, name: str, shares: Shares | None) -> None:
        """Serve an alias with these shares, or not any more. Raises ReloadError, and nothing changes."""

    async def reload(self, name: str) -> None:
        """Serve the bundle as it is now. Raises ReloadError; then the version before still serves."""
