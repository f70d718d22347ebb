"""The arithmetic and the tables of the part about meta models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.bench.figures import Rounds, Sample
from tests.bench.meta_models import RELAYS, Relay
from tests.bench.metas import (
    BLS,
    DETECTOR_CLIENTS,
    DIRECT,
    KEPT,
    ONE,
    ONE_PLAIN,
    PLAIN,
    between,
    chain_summary,
    copies,
    detector_summary,
    relay_summary,
)
from tests.bench.processes import CLIENT, RUNTIME, SERVER, STUB
from tests.bench.status import model_status
from tests.unit.bench.test_figures import sample

SMALL, LARGE = RELAYS[0], RELAYS[-1]


def used(name: str, number: int = 0, *, p50_us: float = 1000.0, clients: int = 1, **cpu_us: float) -> Sample:
    """Microseconds of CPU by role: server, stub, runtime; 100 where nothing is said."""
    roles = {"server": SERVER, "stub": STUB, "runtime": RUNTIME}
    by_role = {role: cpu_us.get(key, 100.0) for key, role in roles.items()}
    one = sample(name, number, 1000, clients=clients)
    return replace(one, p50_us=p50_us, cpu_us={**by_role, CLIENT: 50.0})


def relays(number: int = 0) -> list[Sample]:
    """Copies of the large tensor take the runtime 1 and the stubs 3 times 5000 us; all else grows by 20000 us."""
    return [
        *(used(between(name, relay), number) for name in (DIRECT, KEPT, BLS) for relay in RELAYS[:-1]),
        used(between(KEPT, LARGE), number, runtime=20_100),
        used(between(DIRECT, LARGE), number, runtime=25_100),
        used(between(BLS, LARGE), number, runtime=25_100, stub=15_100),
    ]


def copied(samples: Sequence[Sample], name: str, copying: float, *roles: str) -> list[float]:
    return copies(Rounds.of(samples), name, SMALL, LARGE, copying, roles)


def test_copies_are_what_the_tensor_costs_beyond_one_that_stays_on_the_device() -> None:
    """CPU that both ways take, and that a small tensor takes, is not a copy's."""
    assert copied(relays(), DIRECT, 5000.0, SERVER, STUB, RUNTIME) == [1.0]
    assert copied(relays(), BLS, 5000.0, SERVER, STUB, RUNTIME) == [4.0]
    assert copied(relays(), BLS, 5000.0, STUB) == [3.0]
    assert copied([*relays(0), *relays(1)], BLS, 5000.0, STUB) == [3.0, 3.0]


def test_the_chain_is_compared_with_one_call_and_by_hand() -> None:
    """Each ratio has its line, and what was to be reached its verdict."""
    p50s = {ONE: 800.0, DIRECT: 1600.0, BLS: 3200.0, ONE_PLAIN: 400.0, PLAIN: 1600.0}
    lines, targets = chain_summary(Rounds.of([used(name, p50_us=p50) for name, p50 in p50s.items()]))

    assert "direct / one call: p50 2.00 (2.00-2.00), CPU 1.00 (1.00-1.00)" in lines
    assert "plain / one plain call: p50 4.00 (4.00-4.00), CPU 1.00 (1.00-1.00)" in lines
    assert "direct / bls: p50 0.50 (0.50-0.50), CPU 1.00 (1.00-1.00)" in lines
    assert [target.reached for target in targets] == [True, False]


def test_the_relay_names_sides_and_sizes() -> None:
    """One line for each ratio at each size, and one for the copies of each side that has some."""
    lines = relay_summary(Rounds.of(relays()), 5000.0)

    assert "direct / bls, 1 MB: p50 1.00 (1.00-1.00), CPU 1.00 (1.00-1.00)" in lines
    assert "direct: 1.0 (1.0-1.0), of that tritonserver 0.0, stub 0.0, runtime 1.0" in lines
    assert "bls: 4.0 (4.0-4.0), of that tritonserver 0.0, stub 3.0, runtime 1.0" in lines


def test_the_detector_is_compared_at_each_number_of_clients() -> None:
    """With the one that was written by hand, and of the transports with each other."""
    samples = [used(name, clients=clients) for clients in DETECTOR_CLIENTS for name in (DIRECT, BLS, PLAIN)]
    text = "\n".join(detector_summary(Rounds.of(samples)))

    for clients in DETECTOR_CLIENTS:
        assert f"direct / plain at {clients} clients: p50 1.00" in text


@pytest.mark.parametrize("relay", RELAYS, ids=lambda relay: relay.label)
def test_a_relay_expects_what_its_models_compute(relay: Relay) -> None:
    """The tensor between them is as large as it says, and its answer the mean of the blocks that are looked at."""
    x = np.arange(256, dtype=np.float32)[None]
    factors = 1 + np.arange(relay.blocks, dtype=np.float32) / np.float32(relay.blocks)
    tensor = (x[:, None, :] * factors[None, :, None]).reshape(1, -1)

    assert tensor.nbytes == relay.nbytes
    wanted = tensor.reshape(1, relay.blocks, 256)[:, :: relay.step].astype(np.float64).mean(1)
    np.testing.assert_allclose(relay.case(keep=False).reference(x), wanted, rtol=1e-5)


def test_a_meta_models_counters_are_those_of_the_models_that_it_calls() -> None:
    """Added up, size by size."""

    def model(dispatches: int, sizes: dict[str, int]) -> dict[str, object]:
        return {
            "dispatches": dispatches,
            "useful_rows": 2 * dispatches,
            "device_seconds": 0.5,
            "sizes": sizes,
        }

    status = {
        "models": {"a": model(3, {"0/1": 2, "0/4": 1}), "b": model(1, {"0/1": 1}), "c": model(9, {})},
        "metas": {"both": {"models": ["a", "b"]}},
    }

    found = model_status(status, "both")

    assert (found.dispatches, found.rows, found.device_seconds) == (4, 8, 1.0)
    assert found.sizes == {1: 3, 4: 1}
    assert model_status(status, "a").sizes == {1: 2, 4: 1}
