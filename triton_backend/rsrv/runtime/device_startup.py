"""Start-up of the device and of the thread that moves weights; models are built with both."""

import logging
from collections.abc import Callable

from rsrv.runtime.activity import ActivitySlot
from rsrv.runtime.device import Device, DeviceError
from rsrv.runtime.host_weights import HostMemoryError
from rsrv.runtime.numerics import Computes, probe
from rsrv.runtime.threads import Inbox
from rsrv.runtime.weight_mover import WeightMover
from rsrv.settings import Settings

log = logging.getLogger("rsrv.equipment")


class DeviceStartup:
    """Belongs to the build thread: importing jax takes seconds, in which stubs may already connect.

    `ready` is called on the loop, once, when all of it is there. `slot`: as `WeightMover` has it.
    """

    def __init__(
        self,
        make_device: Callable[[], Device],
        settings: Settings,
        inbox: Inbox,
        ready: Callable[[Device, WeightMover, Computes | None], None],
        slot: ActivitySlot,
    ) -> None:
        self._make_device = make_device
        self._settings = settings
        self._inbox = inbox
        self._ready = ready
        self._slot = slot
        self._device: Device | None = None
        self._whole: tuple[Device, WeightMover] | None = None

    def begin(self) -> None:
        """Before anything else; what fails here is tried again with each model."""
        try:
            self.get()
        except (DeviceError, HostMemoryError) as error:
            log.error("%s", error)

    def get(self) -> tuple[Device, WeightMover]:
        """Return the device and the weight mover; make what is missing.

        Raises DeviceError and HostMemoryError.
        """
        if self._whole is None:
            if self._device is None:
                try:
                    self._device = self._make_device()
                except Exception as error:
                    log.exception("no device")
                    raise DeviceError(
                        f"the runtime has no device: {type(error).__name__}: {error}"
                    ) from error
            device = self._device
            computes = probe(device, self._settings.runtime.numerics)
            weight_mover = WeightMover(device, self._settings, self._inbox, self._slot)
            self._whole = device, weight_mover
            self._inbox.post(lambda: self._ready(device, weight_mover, computes))
        return self._whole
