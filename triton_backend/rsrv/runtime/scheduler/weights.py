"""Whose weights are on the device: the one place that starts a load or an eviction.

Every load has an epoch of its own, rising over all models and loads, so a completion names exactly one
load and a late one hurts nobody.

For now the weights of every model are loaded when it is added and stay until it is removed. A byte
budget belongs into `Weights.load`: before it starts a load that does not fit it asks a pure policy which
residents go (idle, unpinned, nothing queued), evicts those first, or leaves the model ABSENT in a line.
"""

from enum import Enum

from rsrv.runtime.scheduler.errors import CallerError
from rsrv.runtime.scheduler.events import EvictWeights, LoadWeights


class Residency(Enum):
    """Where the weights of a model are."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


class Holding:
    """The weights of one model."""

    __slots__ = ("bytes", "epoch", "load_seconds", "loads", "model", "residency")

    def __init__(self, model: str, size: int) -> None:
        self.model = model
        self.bytes = size
        self.residency = Residency.ABSENT
        #: of the current or latest load; 0 before the first.
        self.epoch = 0
        #: completed loads.
        self.loads = 0
        #: how long the latest completed load took; 0.0 before the first.
        self.load_seconds = 0.0


class Weights:
    """The weights of all models."""

    __slots__ = ("_epoch", "bytes")

    def __init__(self) -> None:
        self._epoch = 0
        #: device bytes of all weights that are resident or on their way.
        self.bytes = 0

    def adopt(self, holding: Holding) -> None:
        """Weights that are on the device already."""
        self._epoch += 1
        holding.epoch = self._epoch
        holding.residency = Residency.RESIDENT
        self.bytes += holding.bytes

    def load(self, holding: Holding) -> LoadWeights:
        """Start the load of absent weights."""
        self._epoch += 1
        holding.epoch = self._epoch
        holding.residency = Residency.LOADING
        self.bytes += holding.bytes
        return LoadWeights(holding.model, holding.epoch)

    def check(self, model: str, epoch: int) -> None:
        """Refuse the completion of a load that was never asked for.

        Raises:
            CallerError: no load had that epoch yet.
        """
        if not 0 < epoch <= self._epoch:
            raise CallerError(
                f"a load of model {model!r} ended with epoch {epoch}; the latest is {self._epoch}"
            )

    def loaded(self, holding: Holding, seconds: float) -> None:
        """The load under way ended well."""
        holding.residency = Residency.RESIDENT
        holding.loads += 1
        holding.load_seconds = seconds

    def failed(self, holding: Holding) -> None:
        """The load under way ended without weights."""
        holding.residency = Residency.ABSENT
        self.bytes -= holding.bytes

    def evict(self, holding: Holding) -> EvictWeights:
        """Free resident weights on which nothing executes."""
        holding.residency = Residency.ABSENT
        self.bytes -= holding.bytes
        return EvictWeights(holding.model, holding.epoch)
