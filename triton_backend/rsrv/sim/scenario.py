"""Reading of scenario files: checks of the whole scenario, and its resolution for the simulation."""

import csv
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from rsrv.explain import YamlError, explain, read_yaml
from rsrv.placement.options import ModelOptions
from rsrv.runtime.stored_executables import StoredExecutables, StoredExecutablesError
from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import Program
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.sim.naive import NAIVE
from rsrv.sim.schema import (
    LONGEST,
    Bursts,
    ClosedLoop,
    File,
    GatewayKeys,
    ModelKeys,
    Poisson,
    RequestKeys,
    TraceKeys,
    Zipf,
)
from rsrv.text import nearest


class ScenarioError(Exception):
    """The scenario cannot be run. Each line of the message names the file and the key, and says what to do."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A resolved scenario. The `models` of its sources name single models. `recorded` has all requests of traces."""

    discipline: str
    seed: int
    #: Seconds of the scenario, or None if it ends with the last listed request.
    duration: float | None
    settings: SchedulerSettings
    programs: Mapping[str, Program]
    lives: Mapping[str, "Life"]
    #: Standard deviation of each model's real executions, relative to their cost.
    jitter: Mapping[str, float]
    #: True if models start with their weights on the device, as far as the budget allows.
    warm: bool
    start_timeout_s: float
    #: Maximum number of bytes of host copies, or None for no limit.
    host_memory_bytes: int | None
    #: Rate of reads from the disk, or None if they take no time.
    read_bytes_per_s: float | None
    requests: Sequence[RequestKeys]
    recorded: Sequence[Sequence[RequestKeys]]
    poisson: Sequence[Poisson]
    zipf: Sequence[Zipf]
    bursts: Sequence[Bursts]
    closed: Sequence[ClosedLoop]
    #: Lengths of the variants of each model with a padded axis.
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: Seconds that an answer takes outside the runtime.
    front_s: float = 0.0
    devices: int = 1
    #: Number of servers. Each has the same number of devices.
    servers: int = 1
    #: Options of the gateway. Their `models` name single models. None means that there is one device and no gateway.
    gateway: GatewayKeys | None = None
    #: For each model or group of equal models with estimated costs, the card for which the costs are estimated.
    estimated: Mapping[str, str] = field(default_factory=dict)


class IdleLimits(NamedTuple):
    """Idle limits of a model: seconds without a request."""

    #: After this time, the weights leave the device.
    device: float
    #: After this time, the weights leave host memory.
    host: float
    #: After this time, the model falls back to cold.
    executable: float


class Life(NamedTuple):
    """How a model starts and falls back."""

    #: True if the model starts with its first request, False if it starts at time 0.
    lazy: bool
    #: Seconds to compile the model or to load its executable.
    start_s: float
    idle: IdleLimits


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file and the traces it names.

    Raises:
        ScenarioError: a file cannot be read, or its scenario cannot be run.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScenarioError(f"{path} cannot be read: {why}. Name a file with a scenario") from None
    return parse_scenario(text, str(path), path.parent)


def parse_scenario(text: str, source: str = "scenario", folder: Path = Path()) -> Scenario:
    """Parse the text of a scenario file. `source` is the file's name in messages. Paths of traces are relative to `folder`."""
    try:
        raw = read_yaml(text, of="keys")
    except YamlError as error:
        raise ScenarioError(f"{source}: {error}") from None
    try:
        file = File.model_validate(raw)
    except ValidationError as error:
        lines = (f"{source}: {explain(problem, File, raw)}" for problem in error.errors())
        raise ScenarioError("\n".join(lines)) from None
    problems: list[str] = []
    scenario = _resolve(file, folder, problems)
    if problems:
        raise ScenarioError("\n".join(f"{source}: {problem}" for problem in problems))
    return scenario


def _resolve(file: File, folder: Path, problems: list[str]) -> Scenario:
    known = [*DISCIPLINES, *NAIVE]
    discipline = file.discipline or file.settings.discipline
    if discipline not in known:
        problems.append(f"discipline: there is no {discipline!r}{nearest(discipline, known)}")
    for source in file.arrivals.endless if file.duration is None else ():
        problems.append(f"duration: missing: say for how many seconds requests of arrivals.{source} arrive")
    if file.devices % (file.servers or 1):
        problems.append(
            f"servers: {file.devices} devices cannot be divided among {file.servers} servers equally"
        )
    groups = _groups(file.models, problems)
    _check_shares(file.models, problems)
    estimates = {
        group: _estimates(group, folder / model.compiled, problems)
        for group, model in file.models.items()
        if model.compiled is not None
    }
    programs = {
        name: _program(name, group, file.models[group], file, estimates.get(group))
        for group, names in groups.items()
        for name in names
    }
    arrivals = file.arrivals
    lives = {name: _life(file.models[group], file) for group, names in groups.items() for name in names}
    changing = file.runtime.host_memory_bytes is not None or any(
        life.lazy or min(life.idle) < inf for life in lives.values()
    )
    if changing and (file.devices > 1 or file.gateway is not None):
        problems.append(
            "runtime: cold starts, idle limits and host memory are simulated on one device: leave out `devices` and `gateway`"
        )
    recorded = [list(read_trace(trace, folder, problems)) for trace in arrivals.trace]
    for index, request in enumerate(arrivals.requests):
        if request.model not in programs:
            problems.append(f"arrivals.{index}.model: {_no_model(request.model, programs)}")
    for trace, requests in zip(arrivals.trace, recorded, strict=True):
        for name in dict.fromkeys(request.model for request in requests if request.model not in programs):
            problems.append(f"arrivals.trace: {trace.path}: {_no_model(name, programs)}")
    lengths = {
        name: model.lengths for group, model in file.models.items() if model.lengths for name in groups[group]
    }
    requests = _with_variants(arrivals.requests, lengths, "arrivals", problems)
    recorded = [
        _with_variants(requests_of_trace, lengths, f"arrivals.trace: {trace.path}", problems)
        for trace, requests_of_trace in zip(arrivals.trace, recorded, strict=True)
    ]
    names = _Names(groups, programs, problems)
    section = file.settings.model_dump(exclude={"max_queue_depth", "depth"})
    # The simulated device gets its next execution at the instant when the previous one ends. A greater depth gains nothing.
    section |= {"discipline": discipline, "depth": file.settings.depth or 1}
    return Scenario(
        discipline=discipline,
        seed=file.seed,
        duration=file.duration,
        settings=SchedulerSettings(**section, weight_budget_bytes=file.device.weight_budget_bytes),
        programs=programs,
        lives=lives,
        jitter={name: file.models[group].cost_jitter for group, names in groups.items() for name in names},
        warm=file.device.warm,
        start_timeout_s=file.runtime.start_timeout_s,
        host_memory_bytes=file.runtime.host_memory_bytes,
        read_bytes_per_s=file.device.read_bytes_per_s,
        requests=requests,
        lengths=lengths,
        recorded=recorded,
        poisson=[
            section.model_copy(update={"models": names.shares(section.models)})
            for section in arrivals.poisson
        ],
        zipf=[
            section.model_copy(update={"models": names.all(section.models, "zipf")})
            for section in arrivals.zipf
        ],
        bursts=[
            section.model_copy(update={"models": names.all(section.models, "bursts")})
            for section in arrivals.bursts
        ],
        closed=[
            section.model_copy(update={"models": names.all(section.models, "closed")})
            for section in arrivals.closed
        ],
        front_s=file.front_s,
        devices=file.devices,
        servers=file.servers or file.devices,
        estimated={group: estimate.card for group, estimate in estimates.items()},
        gateway=_gateway(file, groups, problems),
    )


def _with_variants(
    requests: Iterable[RequestKeys], lengths: Mapping[str, Sequence[int]], about: str, problems: list[str]
) -> list[RequestKeys]:
    """Return the requests, each with the shortest variant that holds its length.

    Report the first request that is too long for all variants as a problem.
    """
    resolved = []
    for request in requests:
        if request.length:
            known = lengths.get(request.model, ())
            variant = bisect_left(known, request.length)
            if variant == len(known):
                problems.append(
                    f"{about}: a request of {request.model} has the length {request.length}; `lengths` of the model are"
                    f" {', '.join(map(str, known)) or 'not given'}"
                )
                return []
            request = request.model_copy(update={"variant": variant})
        resolved.append(request)
    return resolved


def _gateway(file: File, groups: Mapping[str, Sequence[str]], problems: list[str]) -> GatewayKeys | None:
    options = file.gateway
    if options is None:
        return GatewayKeys() if file.devices > 1 else None
    single = {name for names in groups.values() for name in names}
    models: dict[str, ModelOptions] = {}
    for pattern, section in options.models.items():
        if pattern not in groups and pattern not in single:
            problems.append(f"gateway.models.{pattern}: {_no_model(pattern, [*groups, *single])}")
        models |= dict.fromkeys(groups.get(pattern, [pattern]), section)
    return options.model_copy(update={"models": models})


@dataclass(frozen=True, slots=True)
class _Names:
    """Resolves the names in `models` of a source to single models. A name may stand for a group of models."""

    groups: Mapping[str, Sequence[str]]
    programs: Mapping[str, Program]
    problems: list[str]

    def all(self, patterns: Iterable[str] | None, key: str) -> list[str]:
        """Return the named models, each once."""
        named = self.programs if patterns is None else patterns
        return list(dict.fromkeys(name for pattern in named for name in self._of(pattern, key)))

    def shares(self, weights: Mapping[str, float] | None) -> dict[str, float]:
        """Return the share of each model. The models of a group have equal parts of the group's share."""
        shares: dict[str, float] = {}
        for pattern, share in (dict.fromkeys(self.programs, 1.0) if weights is None else weights).items():
            names = self._of(pattern, "poisson")
            for name in names:
                shares[name] = shares.get(name, 0.0) + share / len(names)
        return shares

    def _of(self, name: str, key: str) -> Sequence[str]:
        if name in self.groups:
            return self.groups[name]
        if name not in self.programs:
            self.problems.append(f"arrivals.{key}.models: {_no_model(name, [*self.groups, *self.programs])}")
        return [name]


def _no_model(name: str, known: Iterable[str]) -> str:
    return f"there is no model {name!r} in `models`{nearest(name, dict.fromkeys(known))}"


def _groups(models: Mapping[str, ModelKeys], problems: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for group, model in models.items():
        names = [group] if model.count is None else [f"{group}-{index}" for index in range(model.count)]
        for name in names:
            if owner.setdefault(name, group) != group:
                problems.append(f"models.{group}: {name!r} is also one of models.{owner[name]}: rename one")
        groups[group] = names
    return groups


def _check_shares(models: Mapping[str, ModelKeys], problems: list[str]) -> None:
    sizes: dict[str, tuple[str, int]] = {}
    for name, model in models.items():
        for group, nbytes in model.shares.items():
            first_model, known = sizes.setdefault(group, (name, nbytes))
            if known != nbytes:
                problems.append(
                    f"models.{name}.shares.{group}: {nbytes} bytes, but {known} bytes in models.{first_model}"
                )


class _Estimates(NamedTuple):
    card: str
    #: Seconds of an execution by variant and size.
    costs: Mapping[tuple[int, int], float]


def _estimates(group: str, path: Path, problems: list[str]) -> _Estimates:
    """Return the estimated costs of a model from a file of executables, without reading the executables. Report missing costs."""
    about = f"models.{group}.compiled"
    try:
        with StoredExecutables(path) as stored:
            contents = stored.contents
    except StoredExecutablesError as error:
        problems.append(f"{about}: {error}")
        return _Estimates("", {(0, 1): 1.0})
    modules = contents.models.get(group)
    if modules is None:
        problems.append(f"{about}: {path} has no model {group!r}{nearest(group, contents.models)}")
    elif not contents.seconds:
        problems.append(
            f"{about}: {path} has no estimates: rsrv does not know the rates of {contents.target.card}"
        )
    elif missing := [key for key, module in modules.items() if module not in contents.seconds]:
        problems.append(
            f"{about}: {path} has no estimate for {', '.join(missing)} of {group} (variant/batch size), which did not compile. "
            "Run rsrv-gen --compile-for again: it says why"
        )
    else:
        costs = {
            (int(variant), int(size)): contents.seconds[module]
            for key, module in modules.items()
            for variant, _, size in [key.partition("/")]
        }
        return _Estimates(contents.target.card, costs)
    return _Estimates("", {(0, 1): 1.0})


def _program(
    name: str, group: str, model: ModelKeys, file: File, estimates: _Estimates | None = None
) -> Program:
    rate = file.device.h2d_bytes_per_s
    variants = model.variants or [model.cost or {}]
    costs_given = {
        (index, size): cost for index, costs in enumerate(variants) for size, cost in costs.items()
    }
    return Program(
        model=name,
        costs=costs_given if estimates is None else estimates.costs,
        coalesce=model.coalesce,
        max_queue_depth=model.max_queue_depth or file.settings.max_queue_depth,
        max_batch_rows=model.max_batch_size,
        weight_bytes=model.weight_bytes,
        tensors={
            f"shared by {group}": model.shared_bytes,
            **{f"group {group}": nbytes for group, nbytes in model.shares.items()},
            f"own of {name}": model.weight_bytes - model.shared_bytes - sum(model.shares.values()),
        },
        pinned=model.residency == "device",
        load_seconds=0.0 if rate is None else model.weight_bytes / rate,
        weight=model.weight,
        max_delay=model.max_delay_us / 1e6,
        idle_seconds=_life(model, file).idle.device,
        padded=model.lengths is not None and model.share_lengths,
    )


def _life(model: ModelKeys, file: File) -> Life:
    default = file.runtime.idle
    own = {**default.model_dump(), **model.idle.model_dump(exclude_unset=True)}
    limits = IdleLimits(own["device"], own["host"], own["executable"])
    return Life((model.start or file.runtime.start) == "lazy", model.start_s, limits)


def read_trace(trace: TraceKeys, folder: Path, problems: list[str]) -> Iterator[RequestKeys]:
    """Yield the requests of a trace with scaled times. Report the first wrong line as a problem."""
    about = f"arrivals.trace: {trace.path}"
    try:
        with (folder / trace.path).open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines, skipinitialspace=True)
            reader.fieldnames = header = [name.strip() for name in reader.fieldnames or ()]
            missing = [name for name in ("t", "model") if name not in header]
            unknown = [name for name in header if name not in RequestKeys.model_fields]
            if len(set(header)) < len(header):
                problems.append(f"{about}: the header {','.join(header)!r} names a column twice")
                return
            if missing:
                problems.append(f"{about}: the header {','.join(header)!r} has no {' and no '.join(missing)}")
                return
            if unknown:
                hint = nearest(unknown[0], RequestKeys.model_fields)
                problems.append(f"{about}: unknown column {unknown[0]!r}{hint}")
                return
            for row in reader:
                if None in row:
                    problems.append(f"{about}, line {reader.line_num}: more fields than the header has")
                    return
                cells = {key: text for key, value in row.items() if (text := (value or "").strip())}
                try:
                    request = RequestKeys.model_validate(cells)
                except ValidationError as error:
                    wrong = explain(error.errors()[0], RequestKeys, cells)
                    problems.append(f"{about}, line {reader.line_num}: {wrong}")
                    return
                if request.t * trace.scale > LONGEST:
                    problems.append(
                        f"{about}, line {reader.line_num}: t times scale is more than {LONGEST:g} s"
                    )
                    return
                yield request.model_copy(update={"t": request.t * trace.scale})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"{about}: cannot be read: {error}")
