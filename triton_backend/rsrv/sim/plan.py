"""Answers to questions about capacity, from simulations of a scenario: how many more models, and how little hardware suffices?

Each question is answered by a search for the most demanding scenario that meets the goal. The search assumes that more models, a
smaller budget or fewer cards never improve the result, so it halves its range with every simulation.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, inf
from random import Random
from typing import Any, NamedTuple

from rsrv.scheduler.events import Outcome, Program
from rsrv.sim.arrivals import instant
from rsrv.sim.record import Record
from rsrv.sim.scenario import Scenario
from rsrv.sim.schema import GatewayKeys, RequestKeys
from rsrv.sim.simulate import simulate_devices
from rsrv.sim.table import aligned
from rsrv.sim.tally import in_time, percentile, ratio
from rsrv.text import amount, duration, percent

#: Maximum number of requests in each simulation of a search. They are taken from the busiest time. A simulation takes about a
#: second.
MOST_REQUESTS = 20_000
#: Maximum number of copies of each model, and of cards, that a search tries.
_MOST_COPIES, _MOST_CARDS = 16, 16
#: For each type in which `rsrv-bundle narrow` stores f32 weights, the factor by which they become smaller.
NARROWER = {"bf16": 2, "i8": 4}
#: A search does not distinguish budgets that differ by less than this share.
_BUDGET_STEP = 0.02
#: A size is worth compiling if at least this share of a model's executions uses it.
_USED = 0.05
#: New sizes are recommended if they save at least this share of a model's device time.
_WORTH = 0.05
#: Maximum number of models with recommended sizes. The models that gain most are chosen.
_NAMED = 10
#: The traffic of each added copy is shifted by this share of the recorded time, compared with the previous copy. The golden ratio
#: spreads any number of copies evenly.
_GOLDEN = 0.618034


@dataclass(frozen=True, slots=True)
class Simulated:
    """The results of a simulated scenario."""

    #: 99th percentile of the latency in seconds, or None without requests. Requests without an answer count as infinitely slow.
    p99_s: float | None
    #: Share of the requests that were answered in time, or None without requests.
    in_time: float | None
    records: Sequence[Record]

    def meets(self, goal_s: float) -> bool:
        """Return whether 99 % of all requests were answered within this time."""
        return self.p99_s is not None and self.p99_s <= goal_s


class Answer(NamedTuple):
    """One question, its answer, and the simulation that shows the answer, or None without a simulation."""

    question: str
    answer: str
    trial: Simulated | None


def try_out(scenario: Scenario) -> Simulated:
    """Simulate a scenario."""
    records = simulate_devices(scenario)
    requests = records[0].requests
    took = sorted(
        request.ended - request.arrived if request.outcome is Outcome.ANSWERED else inf
        for request in requests
    )
    good = sum(in_time(request, inf) for request in requests)
    return Simulated(percentile(took, 0.99), ratio(good, len(requests)), records)


def plan(scenario: Scenario, goal_s: float, tell: Callable[[str], object]) -> Iterator[Answer]:
    """Yield the answers for a recorded scenario. The goal is that 99 % of all requests are answered within `goal_s` seconds.

    `tell` is called with the name of each simulation.
    """

    def attempt(trial_name: str, changed: Scenario) -> Simulated:
        tell(trial_name)
        return try_out(changed)

    now = attempt("as it is", scenario)
    yield Answer("as it is", _as_it_is(scenario), now)
    met = now.meets(goal_s)
    yield _more_models(scenario, goal_s, attempt) if met else Answer("more models", "none", None)
    yield _budget(scenario, goal_s, attempt)
    yield _cards(scenario, goal_s, attempt)
    if any(program.load_seconds for program in scenario.programs.values()):
        for kind, divisor in NARROWER.items():
            trial = attempt(f"weights in {kind}", with_narrow_weights(scenario, divisor))
            whole = amount(_tensor_bytes(scenario) // divisor)
            yield Answer("narrow weights", f"{kind}, {whole} if all are f32 now", trial)
    yield from _sizes(scenario, now, attempt)


Attempt = Callable[[str, Scenario], Simulated]


def _as_it_is(scenario: Scenario) -> str:
    budget = scenario.settings.weight_budget_bytes
    room = "no budget" if budget is None else f"a budget of {amount(budget)}"
    return f"{_counted(len(_asked(scenario)), 'model')} on {_counted(scenario.devices, 'card')}, {room}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def last_good(good: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` for which `good` is true, or 0 if it is true for none.

    If `good` is true for a number, it must be true for all smaller numbers. `good` is not called with 0. A large result may be up
    to 3 % too small, because each trial of hundreds of models takes long.
    """
    low, high = 0, 1
    while high <= most and good(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        if good(middle):
            low = middle
        else:
            high = middle
    return low


# --- question: how many more models? ---------------------------------------------------------------------


def _more_models(scenario: Scenario, goal_s: float, attempt: Attempt) -> Answer:
    trials: dict[int, Simulated] = {}

    def good(count: int) -> bool:
        trials[count] = attempt(f"{count} more models", with_copies(scenario, count))
        return trials[count].meets(goal_s)

    most = _MOST_COPIES * len(_asked(scenario))
    count = last_good(good, most)
    more = " or more" if count == most else ""
    return Answer("more models", f"{count}{more}, each with the traffic of a recorded one", trials.get(count))


def with_copies(scenario: Scenario, count: int) -> Scenario:
    """Return a scenario with `count` more models. They are copies of the models with requests, in turn, with separate traffic."""
    names = _asked(scenario)
    # Shuffle the names, so that even a few copies represent all models.
    Random(0).shuffle(names)
    length = _length(scenario)
    by_model: dict[str, list[RequestKeys]] = defaultdict(list)
    for request in _requests(scenario):
        by_model[request.model].append(request)
    programs, lives, jitter = dict(scenario.programs), dict(scenario.lives), dict(scenario.jitter)
    added: list[RequestKeys] = []
    for number in range(count):
        name = names[number % len(names)]
        copy, shift = f"{name}+{number // len(names) + 1}", _GOLDEN * (number + 1) * length
        programs[copy] = _copied(programs[name], name, copy)
        lives[copy], jitter[copy] = lives[name], jitter[name]
        added += [
            request.model_copy(update={"model": copy, "t": instant((request.t + shift) % length)})
            for request in by_model[name]
        ]
    return replace(
        scenario, programs=programs, lives=lives, jitter=jitter, recorded=[*scenario.recorded, added]
    )


def _copied(program: Program, name: str, copy: str) -> Program:
    tensors = program.tensors
    if tensors is not None:
        # The copy shares the tensors that its model shares. The model's own tensors become the copy's own.
        tensors = {
            f"own of {copy}" if key == f"own of {name}" else key: size for key, size in tensors.items()
        }
    return replace(program, model=copy, tensors=tensors)


# --- budget and cards ------------------------------------------------------------------------------------


def _budget(scenario: Scenario, goal_s: float, attempt: Attempt) -> Answer:
    """Search for the smallest budget, between the weights of the largest model and all weights."""
    question = "smallest weight budget"
    if all(not program.load_seconds for program in scenario.programs.values()):
        return Answer(question, "not known: no load was measured (device.h2d_bytes_per_s)", None)
    whole = _tensor_bytes(scenario)
    least = max(program.weight_bytes for program in scenario.programs.values())
    trials: dict[int, Simulated] = {}

    def budget(step: int) -> int:
        return max(least, round(whole * (1 - step * _BUDGET_STEP)))

    def good(step: int) -> bool:
        settings = replace(scenario.settings, weight_budget_bytes=budget(step))
        trials[step] = attempt(f"{amount(budget(step))} for weights", replace(scenario, settings=settings))
        return trials[step].meets(goal_s)

    if not good(0):
        return Answer(
            question,
            f"none: even {amount(whole)}, which is enough for all weights, does not meet the goal",
            trials[0],
        )
    step = last_good(good, ceil((1 - least / whole) / _BUDGET_STEP))
    # Also show bytes, because the rounded figure may be too small for the largest model.
    text = f"{budget(step)} bytes ({amount(budget(step))})"
    return Answer(question, f"{text}; all weights are {amount(whole)}", trials[step])


def _tensor_bytes(scenario: Scenario) -> int:
    """Return the bytes of all weights. Shared tensors count once."""
    tensors = {
        key: size for program in scenario.programs.values() for key, size in (program.tensors or {}).items()
    }
    return sum(tensors.values())


def with_narrow_weights(scenario: Scenario, divisor: int) -> Scenario:
    """Return a scenario in which the bytes and load times of all weights are divided by `divisor`."""

    def narrow(program: Program) -> Program:
        tensors = program.tensors
        return replace(
            program,
            weight_bytes=program.weight_bytes // divisor,
            load_seconds=program.load_seconds / divisor,
            tensors=None if tensors is None else {key: size // divisor for key, size in tensors.items()},
        )

    programs = {name: narrow(program) for name, program in scenario.programs.items()}
    return replace(scenario, programs=programs)


def _cards(scenario: Scenario, goal_s: float, attempt: Attempt) -> Answer:
    if scenario.host_memory_bytes is not None or any(
        life.lazy or min(life.idle) < inf for life in scenario.lives.values()
    ):
        return Answer(
            "fewest cards", "not known: `runtime` of the scenario is simulated on one device only", None
        )
    trial: Simulated | None = None
    for count in range(1, _MOST_CARDS + 1):
        trial = attempt(_counted(count, "card"), with_cards(scenario, count))
        if trial.meets(goal_s):
            return Answer("fewest cards", str(count), trial)
    return Answer("fewest cards", f"none: even {_MOST_CARDS} cards do not meet the goal", trial)


def with_cards(scenario: Scenario, count: int) -> Scenario:
    """Return a scenario with one server that has this many devices."""
    gateway = None if count == 1 else scenario.gateway or GatewayKeys()
    return replace(scenario, devices=count, servers=1, gateway=gateway)


# --- batch sizes -----------------------------------------------------------------------------------------


def _sizes(scenario: Scenario, now: Simulated, attempt: Attempt) -> Iterator[Answer]:
    """Compare the compiled sizes with all powers of two. The costs of further sizes are estimated from the measured costs."""
    candidates = _candidates(scenario)
    used = _executions(attempt("more batch sizes", with_sizes(scenario, candidates)).records)
    chosen = {
        name: {key for key in candidates[name] if _keeps(key, program, used[name])}
        for name, program in scenario.programs.items()
        if used[name]
    }
    final = attempt("chosen batch sizes", with_sizes(scenario, chosen))
    before, after = _device_seconds(now.records), _device_seconds(final.records)
    changed = 0
    for name in sorted(chosen, key=lambda name: after.get(name, 0.0) - before.get(name, 0.0)):
        compiled = scenario.programs[name].costs.keys()
        add, drop = sorted(chosen[name] - compiled), sorted(compiled - chosen[name])
        gain = 1 - (ratio(after.get(name, 0.0), before.get(name, 0.0)) or 1.0)
        parts = [f"also export {_listed(add)}"] if add and gain >= _WORTH else []
        parts += [f"leave out {_listed(drop)}, which are hardly used"] if drop else []
        if parts:
            changed += 1
            if changed > _NAMED:
                continue
            saved = f": about {percent(gain)} less device time" if add and gain >= _WORTH else ""
            yield Answer("batch sizes", f"{name}: {'; '.join(parts)}{saved}", None)
    yield Answer(
        "batch sizes",
        f"with these changes of {_counted(changed, 'model')}" if changed else "as they are",
        final if changed else None,
    )


def _listed(keys: Sequence[tuple[int, int]]) -> str:
    several = len({variant for variant, _ in keys}) > 1 or any(variant for variant, _ in keys)
    return ", ".join(f"{variant}/{size}" if several else str(size) for variant, size in keys)


def _keeps(key: tuple[int, int], program: Program, used: Counter[tuple[int, int]]) -> bool:
    # Keep the largest size, because the largest requests fit no other. Keep the compiled sizes of a variant without executions.
    largest = max(size for variant, size in program.costs if variant == key[0])
    of_variant = sum(count for (variant, _), count in used.items() if variant == key[0])
    if key[1] == largest or not of_variant:
        return key in program.costs
    return used[key] >= _USED * of_variant


def _candidates(scenario: Scenario) -> dict[str, set[tuple[int, int]]]:
    """Return for each model its compiled sizes, and all smaller powers of two whose costs can be estimated."""
    candidates: dict[str, set[tuple[int, int]]] = {}
    for name, program in scenario.programs.items():
        keys = set(program.costs)
        for variant in {variant for variant, _ in keys}:
            sizes = [size for another, size in program.costs if another == variant]
            if len(sizes) > 1:
                keys |= {
                    (variant, 1 << bit) for bit in range(max(sizes).bit_length()) if 1 << bit < max(sizes)
                }
        candidates[name] = keys
    return candidates


def with_sizes(scenario: Scenario, sizes: Mapping[str, set[tuple[int, int]]]) -> Scenario:
    """Return a scenario whose models are compiled for these variants and sizes."""
    programs = {
        name: replace(program, costs={key: estimate(program.costs, key) for key in sorted(sizes[name])})
        if name in sizes
        else program
        for name, program in scenario.programs.items()
    }
    return replace(scenario, programs=programs)


def estimate(costs: Mapping[tuple[int, int], float], key: tuple[int, int]) -> float:
    """Estimate the seconds of an execution of an unmeasured size, from a line through the two neighbouring sizes.

    A size below all measured sizes costs at least the smallest measured cost in proportion to the rows.
    """
    if key in costs:
        return costs[key]
    variant, size = key
    known = sorted((another, cost) for (of, another), cost in costs.items() if of == variant)
    (low, a), (high, b) = next((two for two in pairwise(known) if size < two[1][0]), (known[-2], known[-1]))
    line = a + (b - a) * (size - low) / (high - low)
    return max(line, a * size / low) if size < low else max(line, 1e-9)


def _executions(records: Sequence[Record]) -> dict[str, Counter[tuple[int, int]]]:
    counts: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for record in records:
        for execution in record.executions:
            counts[execution.execute.model][execution.execute.variant, execution.execute.size] += 1
    return counts


def _device_seconds(records: Sequence[Record]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for record in records:
        for execution in record.executions:
            seconds[execution.execute.model] += execution.ended - execution.started
    return seconds


# --- traffic that the searches replay --------------------------------------------------------------------


def busiest(scenario: Scenario, most: int = MOST_REQUESTS) -> Scenario:
    """Return a scenario with at most `most` of the recorded requests: those of the busiest time."""
    requests = sorted(_requests(scenario), key=lambda request: request.t)
    if len(requests) > most:
        first = min(
            range(len(requests) - most + 1), key=lambda at: requests[at + most - 1].t - requests[at].t
        )
        began = requests[first].t
        requests = [
            request.model_copy(update={"t": instant(request.t - began)})
            for request in requests[first : first + most]
        ]
    length = max((request.t for request in requests), default=0.0) + 1e-3
    return replace(scenario, requests=(), recorded=[requests], duration=length)


def _requests(scenario: Scenario) -> list[RequestKeys]:
    return [request for trace in (scenario.requests, *scenario.recorded) for request in trace]


def _asked(scenario: Scenario) -> list[str]:
    """Return the models with requests, in listing order."""
    models = {request.model for request in _requests(scenario)}
    return [name for name in scenario.programs if name in models]


def _length(scenario: Scenario) -> float:
    return scenario.duration or max((request.t for request in _requests(scenario)), default=1.0)


def page(answers: Sequence[Answer]) -> str:
    """Return a table: a row for each answer."""
    head = ("", "p99", "in time", "answer")
    # Put the texts last, because the table aligns all other columns to the right.
    lines = aligned(
        [head[:3], *((answer.question, *_cells(answer.trial)) for answer in answers)]
    ).splitlines()
    return "\n".join(
        f"{line}  {text}"
        for line, text in zip(lines, (head[3], *(answer.answer for answer in answers)), strict=True)
    )


def _cells(trial: Simulated | None) -> tuple[str, str]:
    if trial is None:
        return "", ""
    p99 = trial.p99_s
    return "never" if p99 == inf else duration(p99), percent(trial.in_time)


def to_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the answers for programs."""
    return [
        {
            "question": answer.question,
            "answer": answer.answer,
            "p99_s": None if answer.trial is None or answer.trial.p99_s == inf else answer.trial.p99_s,
            "in_time": None if answer.trial is None else answer.trial.in_time,
        }
        for answer in answers
    ]
