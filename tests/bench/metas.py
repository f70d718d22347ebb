"""The part `metas`: meta models that call the runtime directly or through Triton, and the same models written by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from tests.bench import meta_models, report, scenes
from tests.bench.figures import Rounds, Sample, Spread, Target
from tests.bench.load import Side, measure
from tests.bench.meta_models import CHAIN, ONE_CALL, RELAYS, Relay
from tests.bench.phases import say, served, told
from tests.bench.plain_chain import STAGES
from tests.bench.processes import RUNTIME, SERVER, STUB
from tests.bench.verify import verify

DIRECT, KEPT, BLS, PLAIN = "direct", "kept", "bls", "plain"
ONE, ONE_PLAIN = "one call", "one plain call"
DETECTOR_CLIENTS = (1, 8)
#: Shortest window, in seconds, for requests with the largest tensors, because there are few of them.
_LONG = 1.5


@dataclass(frozen=True)
class Turn:
    """One of the sides that are measured in turns: its name in the results, and its requests."""

    name: str
    server: Side
    model: str
    clients: int = 1
    least_window_s: float = 0.0
    #: Input data of perf_analyzer.
    data: str = "random"

    def measure(self, number: int, window_s: float) -> Sample:
        side = Side(self.name, self.server.server, self.server.has_runtime)
        return measure(side, self.model, self.clients, number, max(window_s, self.least_window_s), self.data)


def part(rounds: int, window_s: float) -> tuple[list[str], list[Target], dict[str, Any]]:
    """Measure everything. Return lines of text, targets, and the samples."""
    with contextlib.ExitStack() as stack:
        servers = {
            transport: stack.enter_context(
                served(f"metas-{transport}", meta_models.repository(transport), has_runtime=True)
            )
            for transport in (DIRECT, BLS)
        }
        servers[PLAIN] = stack.enter_context(
            served("metas-plain", meta_models.plain_repository(), has_runtime=False)
        )
        verify_all(servers)
        chain = in_turns(chain_turns(servers), rounds, window_s)
        copying = copy_us(RELAYS[-1].nbytes)
        relays = in_turns(relay_turns(servers), rounds, window_s)
        detector = in_turns(detector_turns(servers), rounds, window_s)
    chain_lines, targets = chain_summary(Rounds.of(chain))
    lines = [*chain_lines, "", *relay_summary(Rounds.of(relays), copying)]
    lines += ["", *detector_summary(Rounds.of(detector))]
    raw = {
        "chain": [asdict(sample) for sample in chain],
        "relays": [asdict(sample) for sample in relays],
        "detector": [asdict(sample) for sample in detector],
        "copy_us": copying,
    }
    return lines, targets, raw


def in_turns(turns: Sequence[Turn], rounds: int, window_s: float) -> list[Sample]:
    """Measure the sides in turns. Each round begins with another side, and keeps the order of the others."""
    samples = []
    for number in range(rounds):
        first = number % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            sample = turn.measure(number, window_s)
            samples.append(sample)
            say(told(sample, rounds))
    return samples


def verify_all(servers: Mapping[str, Side]) -> None:
    """Check the answers of all servers before anything is measured. Raises BenchFailed."""
    for name, side in servers.items():
        count = verify(side.server.grpc_url, meta_models.chain_case())
        count += verify(side.server.grpc_url, meta_models.one_call_case())
        for relay in RELAYS:
            for keep in (False, True):
                if side.has_runtime and (name == DIRECT or not keep):
                    count += verify(side.server.grpc_url, relay.case(keep=keep), requests=2)
        say(f"{name}: {count} answers right")
    answers = {name: scenes.detect(side.server.grpc_url) for name, side in servers.items()}
    for name in (BLS, PLAIN):
        scenes.compare(name, answers[name], answers[DIRECT])
    shapes = sum(int(answer["count"].sum()) for answer in answers[DIRECT])
    say(f"detector: {len(answers[DIRECT])} images, in which all find the same {shapes} shapes")


# --- a chain of three -----------------------------------------------------------------------------------------------


def chain_turns(servers: Mapping[str, Side]) -> list[Turn]:
    return [
        Turn(ONE, servers[DIRECT], ONE_CALL),
        Turn(DIRECT, servers[DIRECT], CHAIN),
        Turn(BLS, servers[BLS], CHAIN),
        Turn(ONE_PLAIN, servers[PLAIN], ONE_CALL),
        Turn(PLAIN, servers[PLAIN], CHAIN),
    ]


def chain_summary(rounds: Rounds) -> tuple[list[str], list[Target]]:
    """Return lines of text, and the targets."""
    lines = [
        f"a chain of {len(STAGES)} small models, and one call of such a model; 1 client",
        report.load_table(rounds, [(name, 1) for name in (ONE, DIRECT, BLS, ONE_PLAIN, PLAIN)]),
    ]
    for over, under in (
        (DIRECT, ONE),
        (BLS, ONE),
        (PLAIN, ONE_PLAIN),
        (DIRECT, BLS),
        (DIRECT, PLAIN),
        (BLS, PLAIN),
    ):
        p50 = rounds.ratio(over, under, 1, lambda sample: sample.p50_us)
        cpu = rounds.ratio(over, under, 1, report.server_cpu)
        lines.append(f"{over} / {under}: p50 {report.spread_text(p50)}, CPU {report.spread_text(cpu)}")
    lines.append(report.rounds_line(rounds))
    value = rounds.ratio(DIRECT, ONE, 1, lambda sample: sample.p50_us).median
    return lines, [
        Target("p50 of a chain of three, direct / one call", value, 2.0, at_least=False),
        Target("the same, hoped for", value, 1.25, at_least=False),
    ]


# --- a tensor between two stages ------------------------------------------------------------------------------------


def relay_turns(servers: Mapping[str, Side]) -> list[Turn]:
    turns = []
    for relay in RELAYS:
        for name, server in ((DIRECT, DIRECT), (KEPT, DIRECT), (BLS, BLS)):
            model = relay.meta(keep=name == KEPT)
            long = _LONG if relay is RELAYS[-1] else 0.0
            turns.append(Turn(between(name, relay), servers[server], model, least_window_s=long))
    return turns


def between(name: str, relay: Relay) -> str:
    """Return the name of a side in the results."""
    return f"{name}, {relay.label}"


def relay_summary(rounds: Rounds, copying: float) -> list[str]:
    """Return lines of text. `copying`: CPU microseconds of a copy of the largest tensor."""
    names = [between(name, relay) for relay in RELAYS for name in (DIRECT, KEPT, BLS)]
    lines = [
        "two models with a tensor between them; 1 client",
        report.load_table(rounds, [(name, 1) for name in names]),
    ]
    for relay in RELAYS:
        for over, under in ((KEPT, DIRECT), (DIRECT, BLS)):
            pair = between(over, relay), between(under, relay)
            p50 = rounds.ratio(*pair, 1, lambda sample: sample.p50_us)
            cpu = rounds.ratio(*pair, 1, report.server_cpu)
            lines.append(
                f"{over} / {under}, {relay.label}: p50 {report.spread_text(p50)}, CPU {report.spread_text(cpu)}"
            )
    small, large = RELAYS[0], RELAYS[-1]
    lines.append(
        f"a copy of {large.label}, from warm to warm memory, takes {copying / 1e3:.1f} ms of CPU."
        " CPU for the tensor, beyond what it takes when kept on the device, in such copies:"
    )
    for name in (DIRECT, BLS):
        by_role = {
            role: Spread.of(copies(rounds, name, small, large, copying, [role])).median
            for role in (SERVER, STUB, RUNTIME)
        }
        all_roles = Spread.of(copies(rounds, name, small, large, copying, list(by_role)))
        parts = ", ".join(f"{role} {value:.1f}" for role, value in by_role.items())
        lines.append(f"{name}: {report.spread_text(all_roles, 1)}, of that {parts}")
    lines.append(report.rounds_line(rounds))
    return lines


def copies(
    rounds: Rounds, name: str, small: Relay, large: Relay, copying: float, roles: Sequence[str]
) -> list[float]:
    """Return, for each round, how many copies of the large tensor would need the CPU time that these processes spend on it.

    The CPU time for the tensor is the CPU time of a request with the large tensor, minus that of a request with the small one.
    The same difference for requests whose tensor stays on the device is subtracted. One copy takes `copying` microseconds.
    """

    def used(name: str, relay: Relay) -> dict[int, float]:
        samples = rounds.of_side(between(name, relay), 1)
        return {sample.round: sum(sample.cpu_us[role] for role in roles) for sample in samples}

    grown = {
        each: {number: used(each, large)[number] - before for number, before in used(each, small).items()}
        for each in (name, KEPT)
    }
    return [(value - grown[KEPT][number]) / copying for number, value in sorted(grown[name].items())]


def copy_us(nbytes: int) -> float:
    """Return the CPU microseconds of one copy between memory areas that have been used before."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    took = []
    for _ in range(9):
        started = time.thread_time()
        np.copyto(target, source)
        took.append(time.thread_time() - started)
    return median(took) * 1e6


# --- the detector ---------------------------------------------------------------------------------------------------


def detector_turns(servers: Mapping[str, Side]) -> list[Turn]:
    data = str(scenes.write_requests())
    return [
        Turn(name, servers[name], scenes.DETECTOR, clients, data=data)
        for clients in DETECTOR_CLIENTS
        for name in (DIRECT, BLS, PLAIN)
    ]


def detector_summary(rounds: Rounds) -> list[str]:
    """Return lines of text."""
    cases = [(name, clients) for clients in DETECTOR_CLIENTS for name in (DIRECT, BLS, PLAIN)]
    lines = ["the detector, an image a request", report.load_table(rounds, cases)]
    for clients in DETECTOR_CLIENTS:
        for over, under in ((DIRECT, PLAIN), (BLS, PLAIN), (DIRECT, BLS)):
            p50 = rounds.ratio(over, under, clients, lambda sample: sample.p50_us)
            rate = rounds.ratio(over, under, clients, lambda sample: sample.infer_per_s)
            cpu = rounds.ratio(over, under, clients, report.server_cpu)
            lines.append(
                f"{over} / {under} at {clients} clients: p50 {report.spread_text(p50)},"
                f" infer/s {report.spread_text(rate)}, CPU {report.spread_text(cpu)}"
            )
    return [*lines, report.rounds_line(rounds)]
