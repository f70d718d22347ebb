"""Sentences for people about the state and the history of a model, from the data of the control service."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from rsrv.control.grpc_service import word
from rsrv.control.v1 import control_pb2 as pb
from rsrv.text import amount, duration, one_line

#: Sentences about a model by `what` and `why` of a record. The entry (what, "") is for any other `why`. An empty sentence means
#: that another record of the same moment already reports the same.
_SENTENCES = {
    ("added", ""): "added to the scheduler",
    ("arrived", ""): "{requests} arrived",
    ("expired on arrival", ""): "{requests} refused: the deadline had passed on arrival",
    ("expired", ""): "{requests} ended: the deadline passed while waiting",
    ("shed", ""): "{requests} ended early: the deadline could not be met any more",
    ("cancelled", ""): "{requests} cancelled",
    ("execute", ""): "{requests} executed {alone}: {rows}",
    ("execute again", ""): "{requests} executed again with all other weights evicted: {rows}",
    ("answered", ""): "{requests} answered after {seconds} on the device",
    ("failed", ""): "{requests} failed after {seconds} on the device: {why}",
    ("no memory", ""): "there was no memory for the execution; it is retried once",
    ("no memory to warm up", ""): "there was no memory for the warm-up; it is retried once",
    ("warmed up", ""): "warmed up",
    ("warm-up failed", ""): "the warm-up failed",
    ("goes on", ""): "continues after a pause",
    ("paused: drain", ""): "paused: waiting requests execute, new ones are refused",
    ("paused: hold", ""): "paused: requests wait",
    ("paused: reject", ""): "paused: all requests are refused",
    ("policy changed", ""): "policy changed: {why}",
    ("removed", ""): "removed",
    ("pinned", ""): "pinned: its weights stay on the device",
    ("unpinned", ""): "unpinned: other models may use the memory of its weights",
    ("prefetch", ""): "an operator or the placement asked for its weights",
    ("to be evicted", ""): "an operator asked to evict its weights",
    (
        "no room",
        "",
    ): "its weights are not loaded: they do not fit, and no other weights may be evicted for them",
    ("load failed", ""): "its weights could not be loaded: {why}",
    ("abandon load", ""): "the read or load of its weights is abandoned: nothing waits for them",
    (
        "weights queued",
        "required",
    ): "its weights wait for their load: the model is pinned, or to be warmed up",
    ("weights queued", "demand"): "its weights wait for their load: requests need them",
    ("weights queued", "prefetch"): "its weights wait to be loaded before requests arrive",
    ("weights queued", "restore"): "its weights wait to be loaded into free memory again",
    ("weights reading", ""): "reading its weights from disk",
    ("weights loading", ""): "its weights load ({bytes})",
    ("weights resident", "loaded"): "its weights are on the device after {seconds}",
    ("weights resident", "adopt"): "its weights were on the device already",
    ("weights resident", "keep"): "its weights stay on the device after all",
    ("weights resident", "warmed up"): "",
    ("weights reserved", ""): "the warm-up begins",
    ("weights evicting", ""): "",
    ("weights absent", "room"): "evicted to make room for {model} ({bytes})",
    ("weights absent", "asked"): "evicted: an operator asked for it, or a warm-up ended ({bytes})",
    ("weights absent", "budget"): "evicted: the weights exceeded the budget ({bytes})",
    ("weights absent", "compaction"): "evicted by a compaction of the device's memory ({bytes})",
    ("weights absent", "idle"): "evicted: unused for longer than its limit ({bytes})",
    ("weights absent", "removed"): "evicted: the model was removed ({bytes})",
    ("weights absent", "withdraw"): "its weights are not needed any more",
    ("weights absent", "end of read"): "its weights were read from disk in {seconds}",
    ("weights absent", "not loaded"): "",
    ("weights absent", "abandoned"): "the read or load of its weights ended early",
    ("weights absent", "end of back-off"): "its weights may be loaded again",
    ("weights backoff", ""): "its weights are not loaded for {seconds}",
    ("model reading", ""): "registered by its first stub; its modules are read",
    ("model compiling", ""): "compiling",
    ("model warming up", ""): "compiled; warming up",
    ("model ready", ""): "ready",
    ("model draining", ""): "no stub needs the model; its last executions end",
    ("model failed", ""): "failed to start",
    ("model gone", ""): "the version was removed",
}
#: Words for the reasons of refusals.
_REFUSALS = {
    "queue_full": "the queue was full",
    "unloaded": "the model was removed",
    "too_many_rows": "more rows than the largest compiled size",
    "unknown_variant": "no module is compiled for that input shape",
    "paused": "the model was paused",
    "not_resident": "its weights were not on the device, and requests do not load them",
    "no_memory": "shortly before, there had been no memory for its weights",
    "not_loaded": "shortly before, its weights could not be loaded",
}
#: For each outcome of a request, the words before its time.
_OUTCOMES = {
    "answered": "answered after",
    "waiting": "still waits after",
    "executing": "not answered yet after",
    "refused": "refused after",
    "expired": "its deadline passed: ended after",
    "shed": "its deadline could not be met any more: ended after",
    "cancelled": "cancelled after",
    "failed": "failed after",
}
#: Parts of a request's time that are shorter than this are left out. In seconds.
MIN_PART_S = 50e-6


def history_lines(answer: pb.GetHistoryResponse, now: float) -> list[str]:
    """Return a line for each record of all histories, the oldest first, and then lines about what absent weights wait for now.

    `now` is Unix time.
    """
    several = len(answer.histories) > 1
    devices = len({history.device for history in answer.histories}) > 1
    timed, waits = [], []
    for history in answer.histories:
        where = (
            f"device {history.device}, {history.key}: " if devices else f"{history.key}: " if several else ""
        )
        sentences = ((record.unix_s, record_sentence(record)) for record in history.records)
        timed += [(at, where + text) for at, text in sentences if text]
        if history.waits_for:
            waits.append(f"{clock_time(now, now)} {where}its weights are {history.waits_for}")
    timed.sort(key=lambda line: line[0])
    return [*(f"{clock_time(at, now)} {one_line(text)}" for at, text in timed), *map(one_line, waits)]


def request_lines(answer: pb.GetRequestsResponse, now: float) -> list[str]:
    """Return a line for each request, and one for each eviction of weights that a request then needed, in the order of time."""
    several = len({request.device for request in answer.requests}) > 1
    timed: list[tuple[float, str]] = []
    for request in answer.requests:
        where = f" on device {request.device}" if several else ""
        timed.append((request.arrived_unix_s, request_sentence(request, where)))
        if request.HasField("evicted"):
            timed.append(
                (request.evicted.unix_s, f"{request.model}{where} was {record_sentence(request.evicted)}")
            )
    # Remove duplicates: requests that waited for the same weights yield the same line about the eviction.
    lines = sorted(dict.fromkeys(timed), key=lambda line: line[0])
    return [f"{clock_time(at, now)} {one_line(text)}" for at, text in lines]


def request_sentence(slow: pb.SlowRequest, where: str = "") -> str:
    """Return a sentence about how one request's time was spent."""
    rows = f"{slow.rows} {'row' if slow.rows == 1 else 'rows'}"
    by_meta = ", called by a meta model," if slow.call else ""
    parts = [
        (slow.paused_s, "for the end of a pause"),
        (slow.weights_s, "for its weights"),
        (slow.peers_s, "for more requests to share its execution (max_delay_us)"),
        (slow.others_s, _behind(slow)),
    ]
    parts_shown = [f"{duration(seconds)} {part}" for seconds, part in parts if seconds >= MIN_PART_S]
    waited = sum(seconds for seconds, _ in parts)
    divided = f" in {slow.parts} parts" if slow.parts else ""
    text = f"request {slow.number} of {rows}{divided} for {slow.model}{where}{by_meta} "
    text += (
        f"waited {duration(waited)}: {', '.join(parts_shown)}"
        if len(parts_shown) > 1
        else f"waited {''.join(parts_shown) or 'no time'}"
    )
    if slow.batch_requests:
        text += f"; {'executes' if slow.outcome == 'executing' else 'executed'} {_batch(slow)}"
        text += f" {'for' if slow.outcome == 'executing' else 'in'} {duration(slow.executing_s)}"
    elif slow.parts:
        text += f"; executed in {duration(slow.executing_s)}"
    deadline = f", with a deadline of {duration(slow.deadline_s)}" if slow.HasField("deadline_s") else ""
    text = f"{text}; {_OUTCOMES.get(slow.outcome, slow.outcome)} {duration(slow.seconds)}{deadline}"
    sides = ((slow.before_s, "before (preprocess, inputs)"), (slow.after_s, "after (postprocess, answer)"))
    front = " and ".join(f"{duration(seconds)} {part}" for seconds, part in sides if seconds >= MIN_PART_S)
    return f"{text}; its model's process took {front}" if front else text


def _behind(slow: pb.SlowRequest) -> str:
    names = ["other requests for this model" if name == slow.model else name for name in slow.behind]
    return f"behind {' and '.join(names)}" if names else "for the device"


def _batch(slow: pb.SlowRequest) -> str:
    further = slow.batch_requests - 1
    shared = f"with {further} {'other' if further == 1 else 'others'}" if further else "alone"
    return shared + (f", padded to {slow.batch_size}" if slow.batch_size > slow.batch_rows else "")


def record_sentence(record: pb.HistoryRecord) -> str:
    """Return the sentence for one record. It is empty if a neighbouring record reports the same."""
    if record.what.startswith("refused "):
        reason = record.what.partition(" ")[2]
        return f"{_requests(record.requests)} refused: {_REFUSALS.get(reason, reason)}"
    sentence = _SENTENCES.get((record.what, record.why), _SENTENCES.get((record.what, "")))
    if sentence is None:  # A newer version of rsrv wrote this record.
        return f"{record.what} {record.why}".rstrip()
    return sentence.format(
        requests=_requests(record.requests),
        alone="together" if record.requests > 1 else "alone",
        rows=_rows(record),
        seconds=duration(record.seconds),
        bytes=amount(record.bytes),
        model=record.model,
        why=record.why,
    )


def clock_time(at: float, now: float) -> str:
    """Return the local time of `at` with milliseconds, and with the date if `now` is on another day."""
    when = datetime.fromtimestamp(at)
    day = "" if when.date() == datetime.fromtimestamp(now).date() else f"{when:%Y-%m-%d} "
    return f"{day}{when:%H:%M:%S}.{when.microsecond // 1000:03}"


def _requests(count: int) -> str:
    return f"{count} requests" if count > 1 else "a request"


def _rows(record: pb.HistoryRecord) -> str:
    padded = f", padded to {record.size}" if record.size > record.rows else ""
    return f"{record.rows} {'row' if record.rows == 1 else 'rows'}{padded}"


def lives(answer: pb.GetStatusResponse) -> dict[str, str]:
    """Return the state of each model and meta model by name, in the words of docs/operating.md."""
    aliases = {alias.name for alias in answer.aliases}
    broken = set(failed_models((failure.name for failure in answer.failures), aliases))
    asleep = bool(answer.devices) and all(device.HasField("asleep_since_unix_s") for device in answer.devices)
    states = dict.fromkeys(broken, "failed")
    for model in (*answer.models, *answer.metas):
        state, weights = state_of(model.versions), weights_of(model.record)
        states[model.name] = life(state, weights, model.starting, broken=model.name in broken, asleep=asleep)
    return states


def failed_models(failures: Iterable[str], aliases: Container[str]) -> Iterator[str]:
    """Yield the names of failed models, without the aliases. A refused alias has the prefix "aliases."."""
    return (name for name in failures if name not in aliases and not name.startswith("aliases."))


def state_of(versions: Sequence[pb.Version]) -> str:
    """Return "ready" if any version is ready, otherwise the state of the last version, or "" if there is no version."""
    states = [word(pb.State, version.state) for version in versions]
    return "ready" if "ready" in states else states[-1] if states else ""


def weights_of(record: pb.ModelRecord) -> str:
    """Return the state of a model's weights. It is coarse for a model that is not built, and empty for a meta model."""
    return record.weights_state or word(pb.Weights, record.weights)


def life(state: str, weights: str, step: str = "", *, broken: bool = False, asleep: bool = False) -> str:
    """Return the state of a model or a version, in the words of docs/operating.md.

    Args:
        state: State of the version. Empty if no version exists.
        weights: State of the weights. Empty for a meta model.
        step: What the start waits for, if that is known.
        broken: True if the newest bundle of the model cannot be loaded.
        asleep: True if all devices sleep.
    """
    if broken and not state:
        return "failed"
    # In a sleep, no weights are on the device, and the stubs wait for a request. A control process that started during the
    # sleep knows no version.
    if asleep and state in ("ready", "cold", ""):
        return "asleep"
    older = ", in an older version" if broken and state in ("ready", "cold") else ""
    # The weights may be on the device before the stub has imported model.py and takes requests.
    if state == "loading" or step == "importing model.py":
        return f"starting, {step}" if step else "starting"
    if state != "ready" or not weights:
        return f"{state}{older}"
    if weights in ("resident", "reserved", "evicting"):
        return f"resident{older}"
    if weights == "reading":
        return f"warm, reading its weights from disk{older}"
    return f"warm{older}" if weights == "absent" else f"warm, weights {weights}{older}"


def failed_how(*, serves: bool) -> str:
    """Return the words for a model whose newest bundle cannot be loaded. `serves` is True if an older version serves."""
    return "is served in an older version" if serves else "has failed"


def model_facts(model: pb.ModelStatus) -> list[tuple[str, str]]:
    """Return a model's front and counters as pairs of a name and a text."""
    policy, record = model.policy, model.record
    return [
        *_front(model),
        ("requests", f"{record.queued} queued, {record.executing} executing; {_counts(record.outcomes)}"),
        *([("sequences", _sequences(record))] if record.sequences else []),
        *([("answers", _answers(record.generated))] if record.generated.get("answers") else []),
        (
            "executions",
            (
                f"{record.dispatches}, {duration(record.device_seconds)} of the device, "
                f"{record.useful_rows} rows, {record.padded_rows} of padding"
            ),
        ),
        (
            "loads",
            f"{record.loads}, {duration(record.load_seconds)} each; {record.misses} misses, {sum(record.evictions.values())} evictions",
        ),
        (
            "policy",
            f"weight {policy.weight:g}, max_delay_us {policy.max_delay_us}, max_queue_depth {policy.max_queue_depth}",
        ),
    ]


def meta_facts(meta: pb.ModelStatus) -> list[tuple[str, str]]:
    """Return a meta model's front, the models that it calls, and its counters as pairs of a name and a text."""
    record = meta.record
    return [
        *_front(meta),
        ("calls", ", ".join(record.calls_models)),
        ("runs", f"{record.queued} waiting, {record.executing} running; {_counts(record.outcomes)}"),
        ("sub-calls", f"{record.calls}, {duration(record.device_seconds)} of the device"),
        ("kept", f"{amount(record.kept_bytes)} on the device"),
    ]


def _front(status: pb.ModelStatus) -> list[tuple[str, str]]:
    return [("front", one_line(status.front))] if status.front else []


def _sequences(model: pb.ModelRecord) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in sorted(model.sequences.items()) if count)
    return (counts or "none") + (f"; {model.generations} of them generations" if model.generations else "")


def _answers(sums: Mapping[str, float]) -> str:
    """Return a text with the number of a model's generated answers, and their mean numbers of tokens and mean times."""
    count, out = sums["answers"], sums["tokens_out"]
    tokens = [
        f"{amount(number / count, '')} tokens {way}"
        for number, way in ((sums["tokens_in"], "in"), (out, "out"))
    ]
    times = [f"{duration(sums['first_token_s'] / count)} to the first"]
    times += [f"{duration(sums['token_s'] / (out - count))} to each next"] if out > count else []
    return f"{amount(count, '')}; on average {', '.join(tokens + times)}"


def _counts(outcomes: Mapping[str, int]) -> str:
    return (
        ", ".join(f"{count} {how.replace('_', ' ')}" for how, count in sorted(outcomes.items()) if count)
        or "none ended yet"
    )
