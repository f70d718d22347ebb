"""Both fronts beside plain models in two cases that `make bench` leaves out: large inputs, and many models at a time.

    python -m tests.bench.fronts

An image of 602 kB a request, by 1 and 8 clients, of perf_analyzer; and 16 models of the tiny kind with 4 clients each. The
sides take turns; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack

from tests.bench import models
from tests.bench.figures import Rounds, Sample, Spread
from tests.bench.load import WINDOWS, Side, load, measure, server_statistics
from tests.bench.phases import NATIVE, PLAIN, RSRV, say, served, told
from tests.bench.places import WORK
from tests.bench.report import load_table, spread_text
from tests.bench.verify import verify

CLIENTS = (1, 8)
#: models of the mixed load, and clients of each
MIXED, EACH = 16, 4
#: seconds of a mixed load, of which its start takes some
_LOADED_S = 15.0


def main() -> None:
    """Measure both cases."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fronts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (%(default)s)")
    parser.add_argument("--window", type=float, default=1.0, help="seconds of one window (%(default)s)")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    images(options.rounds, options.window)
    mixed(options.rounds, WINDOWS * options.window)


def images(rounds: int, window_s: float) -> None:
    """Print the figures of large inputs."""
    samples: list[Sample] = []
    with (
        served(f"{RSRV}-images", models.images_repository(), has_runtime=True) as rsrv,
        served(f"{NATIVE}-images", models.images_repository("native"), has_runtime=True) as native,
        served(f"{PLAIN}-images", models.plain_images_repository(), has_runtime=False) as plain,
    ):
        sides = _verified([rsrv, native, plain], [models.images_case()])
        for number in range(rounds):
            for clients in CLIENTS:
                for side in _turned(sides, number):
                    samples.append(measure(side, models.IMAGES, clients, number, window_s))
                    say(told(samples[-1], rounds))
    kept = Rounds.of(samples)
    names = [side.name for side in sides]
    say(load_table(kept, [(name, clients) for clients in CLIENTS for name in names]))
    for clients in CLIENTS:
        for name in names[:2]:
            ratio = kept.ratio(name, names[2], clients, lambda sample: sample.infer_per_s)
            say(f"{name} / {names[2]} at {clients} clients: infer/s {spread_text(ratio)}")


def mixed(rounds: int, window_s: float) -> None:
    """Print the figures of 16 models under load at the same time."""
    names = models.mlp_names(MIXED)
    rates: dict[str, list[float]] = {RSRV: [], NATIVE: [], PLAIN: []}
    with (
        served(RSRV, models.rsrv_repository(MIXED), has_runtime=True) as rsrv,
        served(NATIVE, models.native_repository(MIXED), has_runtime=True) as native,
        served(PLAIN, models.plain_repository(MIXED), has_runtime=False) as plain,
    ):
        sides = _verified([rsrv, native, plain], [models.mlp_case(name) for name in names])
        for number in range(rounds):
            for side in _turned(sides, number):
                rates[side.name].append(answers_per_s(side, names, window_s))
                say(f"[{number + 1}/{rounds}] {side.name}, {MIXED} models: {rates[side.name][-1]:.0f}/s")
    for name in (RSRV, NATIVE):
        ratio = Spread.of(one / other for one, other in zip(rates[name], rates[PLAIN], strict=True))
        say(f"{name} / {PLAIN}, {MIXED} models, {MIXED * EACH} clients: infer/s {spread_text(ratio)}")


def answers_per_s(side: Side, names: Sequence[str], window_s: float) -> float:
    """Return the answers per second of a window in which each model has its clients."""
    with ExitStack() as loads:
        for name in names:
            loads.enter_context(load(side, name, EACH, _LOADED_S / WINDOWS))
        before, began = _answered(side), time.monotonic()
        time.sleep(window_s)
        return (_answered(side) - before) / (time.monotonic() - began)


def _answered(side: Side) -> int:
    return sum(int(one["inference_count"]) for one in server_statistics(side))


def _verified(sides: list[Side], cases: Sequence[models.Case]) -> list[Side]:
    for side in sides:
        count = sum(verify(side.server.grpc_url, case) for case in cases)
        say(f"{side.name}: {count} answers right")
    return sides


def _turned(sides: Sequence[Side], number: int) -> list[Side]:
    """Return the sides, of which another one is the first in each round."""
    turn = number % len(sides)
    return [*sides[turn:], *sides[:turn]]


if __name__ == "__main__":
    main()
