"""What models are built with: the device, and the tiers that their weights lie on."""

import logging
from collections.abc import Callable

from rsrv.runtime.activity import ActivitySlot
from rsrv.runtime.device import Device, DeviceError
from rsrv.runtime.host_memory import HostMemoryError
from rsrv.runtime.numerics import Computes, probe
from rsrv.runtime.tiers import Tiers
from rsrv.runtime.workers import Inbox
from rsrv.settings import Settings

log = logging.getLogger("rsrv.equipment")


class DeviceStartup:
    """Belongs to the build thread: importing jax takes seconds, in which stubs may already connect.

    `ready` is called on the loop, once, when all of it is there. `slot`: as `Tiers` has it.
    """

    def __init__(
        self,
        make_device: Callable[[], Device],
        settings: Settings,
        inbox: Inbox,
        ready: Callable[[Device, Tiers, Computes | None], None],
        slot: ActivitySlot,
    ) -> None:
        self._make_device = make_device
        self._settings = settings
        self._inbox = inbox
        self._ready = ready
        self._slot = slot
        self._device: Device | None = None
        self._whole: tuple[Device, Tiers] | None = None

    def begin(self) -> None:
        """Before anything else; what fails here is tried again with each model."""
        try:
            self.get()
        except (DeviceError, HostMemoryError) as error:
            log.error("%s", error)

    def get(self) -> tuple[Device, Tiers]:
        """The device and the tiers; makes what is missing.

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
            tiers = Tiers(device, self._settings, self._inbox, self._slot)
            self._whole = device, tiers
            self._inbox.post(lambda: self._ready(device, tiers, computes))
        return self._whole
