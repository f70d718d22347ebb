"""Chooses one of a server's devices for a batch. All functions are pure.

Each stub chooses for its own model. The simulator chooses for all models. The module imports nothing heavy, because stubs
import it.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar
from zlib import crc32

#: A device other than the preferred one gets a batch only if its answer is expected within this share of the preferred device's
#: time. Noise in the measurements must not move traffic, because weights would move with it.
SOONER = 0.8
#: A device outside of the model's mask gets a batch only if its answer is expected within this share of the time of the best
#: device in the mask. The other device must load weights for the batch, which may evict other weights.
ELSEWHERE = 0.25
#: This bit of a mask is set if an operator has named the devices of the mask. Then other devices get a batch only if no device
#: of the mask is alive.
PINNED = 1 << 63

_Device = TypeVar("_Device")


def by_preference(model: str, count: int) -> list[int]:
    """Return the numbers of a server's `count` devices in the order in which a model prefers them. The first is its home.

    The home is computed from the model's name, so that the models of a quiet server are spread over its devices.
    """
    home = crc32(model.encode()) % count
    return [*range(home, count), *range(home)]


def allowed(devices: Sequence[int], mask: int) -> Sequence[int]:
    """Return the devices that a mask of the placement table allows. Bit n of the mask stands for device n (see PINNED).

    Return all devices if the mask allows none of them, for example because the table does not have the model (0).
    """
    return [device for device in devices if mask >> device & 1] or devices


def soonest(
    chosen: Sequence[_Device],
    others: Sequence[_Device],
    answers_in_s: Callable[[_Device], float],
    *,
    pinned: bool = False,
) -> _Device:
    """Return the device that gets a batch.

    Args:
        chosen: the devices that the placement table allows, by preference.
        others: the other devices that serve the model, by preference.
        answers_in_s: returns the seconds until a device would have answered the batch; infinite if the device is dead.
        pinned: if true, choose among the others only if none of the chosen devices is alive.
    """
    device, least = _soonest(chosen, answers_in_s)
    if others and (least == inf or not pinned):
        alternative, seconds = _soonest(others, answers_in_s)
        if seconds < ELSEWHERE * least:
            return alternative
    return device


def _soonest(devices: Sequence[_Device], answers_in_s: Callable[[_Device], float]) -> tuple[_Device, float]:
    """Return the soonest device and its seconds.

    A later device is chosen only if it is clearly sooner than the best earlier one.
    """
    device = devices[0]
    least = answers_in_s(device)
    for next_device in devices[1:]:
        seconds = answers_in_s(next_device)
        if seconds < SOONER * least:
            device, least = next_device, seconds
    return device, least
