"""The models that there are: being built, ready, or leaving; how they are to be treated; and what is told of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rsrv.runtime.models import Model
from rsrv.runtime.policy import Policy
from rsrv.runtime.state_feed import Entry, State, StateFeed, Weights
from rsrv.runtime.transport import Connection, Registration


@dataclass(slots=True)
class ModelEntry:
    """A model: being built (no `model` yet), warmed up, or ready; with the connections that want it."""

    name: str
    #: of its bundle
    digest: str
    model: Model | None = None
    ready: bool = False
    weights: Weights = "absent"
    #: why it does not get ready, once that is known
    error: str | None = None
    connections: dict[int, Connection] = field(default_factory=dict)
    #: nobody wants it any more, but it still executes or loads
    leaving: bool = False
    #: what to do once it has left: those who wanted the same bundle again meanwhile
    afterwards: list[Callable[[], None]] = field(default_factory=list)

    @property
    def state(self) -> State:
        if self.error is not None:
            return "failed"
        if self.leaving:
            return "leaving"
        return "ready" if self.ready else "loading"


class Catalog:
    """All models by key. Whoever changes one says so (`tell`); then watchers are told, if that changes what they see."""

    def __init__(self, policy: Policy, state_feed: StateFeed) -> None:
        self.policy = policy
        self.state_feed = state_feed
        self.listed: dict[str, ModelEntry] = {}

    def get(self, key: str) -> Model:
        """The model that the scheduler speaks of: it knows built ones only."""
        model = self.listed[key].model
        assert model is not None
        return model

    def models(self) -> list[Model]:
        """All that are built."""
        return [listed.model for listed in self.listed.values() if listed.model is not None]

    def serves(self, name: str) -> bool:
        """Whether there is a model by that name, which stays."""
        return any(listed.name == name and not listed.leaving for listed in self.listed.values())

    def built(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Keys of those by these names, or of all, that are built, and stay: the scheduler knows them."""
        wanted = None if names is None else set(names)
        return tuple(
            key
            for key, listed in self.listed.items()
            if listed.model is not None and not listed.leaving and (wanted is None or listed.name in wanted)
        )

    def ready(self, group: Registration) -> bool:
        """Whether all its models are."""
        found = [self.listed.get(key) for key in group.models]
        return all(listed is not None and listed.ready and not listed.leaving for listed in found)

    def add(self, key: str, name: str, digest: str) -> None:
        """It is to be built."""
        self.listed[key] = ModelEntry(name, digest)
        self.tell(key)

    def refuse(self, key: str, name: str, digest: str, why: str) -> None:
        """It is not even tried, unless it is there already."""
        if key not in self.listed:
            self.listed[key] = ModelEntry(name, digest, error=why)
            self.tell(key)
            self.drop(key)

    def drop(self, key: str) -> None:
        """It is there no longer."""
        del self.listed[key]
        self.state_feed.gone(key)

    def moved(self, key: str, weights: Weights) -> None:
        """Its weights are somewhere else now."""
        self.listed[key].weights = weights
        self.tell(key)

    def tell(self, key: str) -> None:
        """It has changed."""
        self.state_feed.put(key, self.describe(key))

    def describe(self, key: str) -> Entry:
        """What watchers see of a model."""
        listed = self.listed[key]
        own = (c for c in listed.connections.values() if c.group is not None and c.group.key == key)
        return Entry(
            listed.name,
            "model",
            listed.digest,
            listed.state,
            listed.error,
            self.policy.residency(listed.name),
            listed.weights,
            _pids(own),
            paused=_paused(self.policy, listed.name),
        )

    def tell_meta(
        self, group: Registration, connections: Iterable[Connection], error: str | None = None
    ) -> None:
        """A meta model has changed, or one that it calls; `connections`: those that serve it. `error`: why none will."""
        stubs = _pids(connections)
        if error is None and not stubs:
            self.state_feed.gone(group.key)
            return
        paused = (mode for name in group.calls if (mode := _paused(self.policy, name)))
        state: State = "ready" if self.ready(group) else "loading"
        self.state_feed.put(
            group.key,
            Entry(
                group.name,
                "meta",
                group.digest,
                state if error is None else "failed",
                error,
                stubs=stubs if error is None else (),
                models=group.models,
                paused=next(paused, None),
            ),
        )


def _pids(connections: Iterable[Connection]) -> tuple[int, ...]:
    return tuple(sorted({connection.peer for connection in connections}))


def _paused(policy: Policy, name: str) -> str | None:
    mode = policy.paused(name)
    return None if mode is None else mode.value
