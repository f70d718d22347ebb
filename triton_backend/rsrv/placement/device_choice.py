"""The choice of a device for a batch, among the devices of one server. Pure.

Each stub chooses for its model, and the simulator for all of them. The module imports nothing heavy, as the stub must.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar
from zlib import crc32

#: A device other than the preferred one gets a batch only if its answer is expected within this share of the preferred device's
#: time. Noise of measurements must not move traffic, and with it weights.
SOONER = 0.8
#: A device outside of the model's mask gets a batch only if its answer is expected within this share of the time. It must load
#: weights for the batch, which may evict other weights.
ELSEWHERE = 0.25
#: Bit of a mask whose devices an operator has named. No other live device gets a batch then.
PINNED = 1 << 63

_Device = TypeVar("_Device")


def by_preference(model: str, count: int) -> list[int]:
    """Return the numbers of a server's `count` devices as a model prefers them, its home first.

    The home follows from the name, so that the models of a quiet server are spread over its devices.
    """
    home = crc32(model.encode()) % count
    return [*range(home, count), *range(home)]


def allowed(devices: Sequence[int], mask: int) -> Sequence[int]:
    """Return those of the devices that a mask of the placement table has, bit n for device n (see PINNED).

    All of them, if the table says nothing of the model (0), or has none of them.
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
        answers_in_s: the seconds until a device would have answered the batch; infinite if it is dead.
        pinned: leave the chosen devices only if none of them is alive.
    """
    device, least = _soonest(chosen, answers_in_s)
    if others and (least == inf or not pinned):
        alternative, seconds = _soonest(others, answers_in_s)
        if seconds < ELSEWHERE * least:
            return alternative
    return device


def _soonest(devices: Sequence[_Device], answers_in_s: Callable[[_Device], float]) -> tuple[_Device, float]:
    """Return the device that answers first, and in how many seconds; the first one if no other is clearly sooner."""
    device = devices[0]
    least = answers_in_s(device)
    for next_device in devices[1:]:
        seconds = answers_in_s(next_device)
        if seconds < SOONER * least:
            device, least = next_device, seconds
    return device, least
