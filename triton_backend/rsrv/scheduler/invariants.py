"""Invariants of the scheduler, which hold after every event.

Of requests:
    1. every live request waits in exactly one queue or is in exactly one execution. That execution runs, or waits
       for its retry after a lack of memory;
    2. arrived = ended + queued + executing: no request is lost or ends twice;
    3. a queue is in the order of service, and its rows are the sum of its requests' rows. Requests are numbered in the order
       of their arrival. Only requests of runs may move up;
    4. no queued request's deadline has passed, and the index of deadlines has all of them;
    5. no request waits for a model that is paused in the mode REJECT, and waiting requests of a held model affect no
       decision.

Of executions:
    6. each uses weights that are on the device, and its useful rows fit into its size;
    19. each starts with the first requests of its queues, in order (`check_start`);
    7. the device is never idle while a resident model has work that need not be delayed, unless a compaction of the
       device's memory is due, the runtime is about to end, or the next request is exclusive and waits for a load or a
       warm-up to end;
    16. an exclusive request shares the device with no other request, execution or load, and the device is kept
        for it only while it is next, or executes.

Of weights:
    8. each tensor belongs to one group. The owners of a group are the models that have its tensors, and its users are the
       owners whose state takes bytes (`TAKING_BYTES`). The bytes on the device are those of the groups with users, each
       counted once. They are within the budget, except for pinned weights, one model that is alone, and weights in use;
    9. the state of weights follows from other facts. Weights are
       - QUEUED if and only if they are absent, in a line of the load queue, and not being read;
       - READING if and only if the one read that runs is theirs;
       - LOADING if and only if the one load that runs is theirs;
       - EVICTING if and only if they are runnable, and an eviction was requested or the model was removed;
       - in BACKOFF if and only if they are absent, in no line, and a back-off runs.
       `LoadQueue.obstacle` says what QUEUED, READING and BACKOFF weights wait for. The number of RESERVED weights is the
       number of warm-ups that run. Models with waiting requests, pinned models and models to be warmed up are in line unless
       their weights are on the device or loading. The link is in use unless the first model in line finds no room. Weights
       without a host copy wait for the disk before the link, and the disk is in use while any of them are in line;
    10. desired weights are on the device, loading or in line. If weights do not load on demand, requests wait for desired
        weights only. Other weights are then present only for a warm-up, or until nothing executes on them. A requested
        eviction has an obstacle. A model drains only while something executes on its weights, or while they are read or
        loaded;
    17. if weights load on demand, the next check for idle weights is not later than the time at which weights on the device
        may reach their model's idle limit;
    11. the derived values of each model are up to date, and the scheduler's sums of expected seconds equal the sums over the
        models.

Of device time under `fair`:
    18. the mean includes the models that wait to execute, execute, or owe device time, each by its weight; each account
       has the number of the model's executions in flight.

Of statistics:
    15. each execution with its rows, each request's wait for its execution, and each missed deadline are measured once.

Of runs of meta models:
    12. the oldest queued request of each is committed, and no other request is;
    13. while a run waits, the limit of admitted runs is reached, unless the runtime is about to end. Runs that call a held
        model are ignored. (The tests' driver checks that no run is admitted above the limit. More runs may be in progress
        after the limit shrank, or when runs that were ignored continue.)
    14. requested = admitted + waiting + expired + refused + withdrawn; no waiting run's deadline has passed.
"""

from math import inf, isclose
from typing import Any

from rsrv.scheduler.discipline import COMMITTED_LEVEL
from rsrv.scheduler.events import DEFAULT_PRIORITY, Execute, InvariantError, Pause
from rsrv.scheduler.fair import Fair
from rsrv.scheduler.load_queue import evictable
from rsrv.scheduler.model import ModelState
from rsrv.scheduler.residency import IDLE_CHECK_S, CompactionState
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.statistics import Stage
from rsrv.scheduler.variant_queue import LiveRequest
from rsrv.scheduler.weight_states import ON_DEVICE, RUNNABLE, TAKING_BYTES, WeightState
from rsrv.scheduler.weights import ModelWeights, SharedTensorGroup


def check(scheduler: Scheduler) -> None:
    """Check all invariants except 19. Raises InvariantError for the first one that does not hold."""
    states = [*scheduler._models.values(), *scheduler._draining.values()]
    for state in states:
        _check_model(scheduler, state)
    _check_requests(scheduler, states)
    _check_runs(scheduler, states)
    _check_admission(scheduler)
    _check_executions(scheduler, states)
    _check_weights(scheduler, states)
    _check_sums(scheduler, states)
    if isinstance(scheduler._discipline, Fair):
        _check_fair(scheduler._discipline)


def check_start(scheduler: Scheduler, execute: Execute, numbered: int) -> None:
    """Check that a new execution has the first requests of its queues, in order (19). The latest event has started it.

    Requests with a higher number than `numbered` are ignored: they moved up in their run during the event, perhaps after
    the start.
    """
    live, state = scheduler._queues.live, scheduler._models[execute.model]
    for variant, queue in state.queues.items():
        started = [live[id].place for id in execute.requests if live[id].request.variant == variant]
        earlier = [entry.place for entry in queue.entries if entry.place[2] <= numbered]
        _require(started == sorted(started), "requests of an execution are out of order (19)", state)
        passed = bool(started and earlier) and started[-1] > min(earlier)
        _require(not passed, "an execution has passed over a request (19)", state)


def _require(true: bool, problem: str, state: ModelState | None = None) -> None:
    if not true:
        raise InvariantError(
            problem,
            None if state is None else state.name,
            () if state is None else tuple(map(str, state.history.records())),
        )


def _check_model(scheduler: Scheduler, state: ModelState) -> None:
    waiting = sum(len(queue) for queue in state.queues.values())
    _require(
        state.queued == waiting, f"{state.queued} requests are counted as queued, but {waiting} wait", state
    )
    _require(
        state.paused is not Pause.REJECT or not waiting,
        "requests wait for a model that rejects them (5)",
        state,
    )
    _require(not state.held or not state.has_work, "a held model affects decisions (5)", state)
    for queue in state.queues.values():
        entries = queue.entries
        _require(
            queue.rows == sum(entry.rows for entry in entries),
            "a queue's rows are not the sum of its requests' rows (3)",
            state,
        )
        place = scheduler._discipline.place
        for entry in entries:
            request, sequence = entry.request, entry.place[2]
            committed = scheduler._queues.runs.get(request.run, [None])[0] is entry
            level = COMMITTED_LEVEL if committed else request.priority or DEFAULT_PRIORITY
            due = request.deadline if request.due is None else request.due
            own = place(level, due, sequence)
            _require(entry.place == own, "a request is not where the discipline places it (3)", state)
        places = [entry.place for entry in entries]
        _require(places == sorted(set(places)), "a queue is out of order (3)", state)
        for entry in entries:
            _require(entry.queue is queue, "a request is in a queue that is not its own (1)", state)
            _require(entry.request.model == state.name, "a request is in another model's queue (1)", state)
            _require(
                entry.rows <= queue.costs.max_rows,
                "a waiting request is larger than the largest compiled size",
                state,
            )
    if state.draining:
        _require(not waiting, "requests wait for a removed model", state)
        busy = state.busy or state.weights.state in (WeightState.READING, WeightState.LOADING)
        _require(busy, "a removed model stays without a cause (10)", state)
    if state.busy:
        _require(state.weights.state in ON_DEVICE, "the model executes without weights (6)", state)


def _check_requests(scheduler: Scheduler, states: list[ModelState]) -> None:
    queued = [entry for state in states for queue in state.queues.values() for entry in queue.entries]
    flying = [*scheduler._running.values(), *scheduler._residency.compaction.retries]
    executing = [request for running in flying for request in running.execute.requests]
    ids = [entry.request.id for entry in queued] + executing
    _require(len(ids) == len(set(ids)), "a request is in two places (1)")
    _require(set(ids) == set(scheduler._queues.live), "live requests are not those queued or executing (1)")
    _require(
        len(queued) == scheduler._queues.queued,
        f"{scheduler._queues.queued} requests are counted as queued, but {len(queued)} wait",
    )
    for request in executing:
        _require(scheduler._queues.live[request].queue is None, f"request {request} executes and waits (1)")

    numbers = [entry.place[2] for entry in scheduler._queues.live.values() if not entry.request.run]
    _require(numbers == sorted(numbers), "requests are not numbered as they arrived (3)")

    ended = scheduler._queues.departed.total() + sum(state.totals.counts.total() for state in states)
    _require(
        scheduler._queues.arrived == ended + len(ids),
        f"{scheduler._queues.arrived} requests have arrived, but {ended} have ended and {len(ids)} are in flight (2)",
    )

    for state in states:
        totals, counts = state.totals, state.totals.counts
        waits = counts.answered + state.executing
        missed = sum(count for stage, count in totals.missed.items() if stage is not Stage.EXECUTE)
        _require(
            (sum(totals.rows.counts), totals.rows.sum) == (totals.dispatches, totals.useful_rows)
            and waits <= sum(totals.queue_wait.counts) <= waits + counts.failed
            and missed == counts.expired + counts.shed,
            "the measurements do not match the counts (15)",
            state,
        )

    dated = {entry for entry in queued if entry.request.deadline not in (None, inf)}
    _require(
        dated == set(scheduler._queues.deadlines.entries()),
        "the known deadlines are not those of the queued requests (4)",
    )
    soonest = scheduler.next_wakeup()
    _require(soonest is None or soonest > scheduler._now, "the deadline of a queued request has passed (4)")


def _check_runs(scheduler: Scheduler, states: list[ModelState]) -> None:
    queued = [entry for state in states for queue in state.queues.values() for entry in queue.entries]
    runs: dict[int, set[LiveRequest]] = {}
    for entry in queued:
        if entry.request.run:
            runs.setdefault(entry.request.run, set()).add(entry)
    known = scheduler._queues.runs
    _require(
        runs == {run: set(own) for run, own in known.items()},
        "the known requests of runs are not the queued ones (12)",
    )
    for own in known.values():
        # Ignore the first request: it got a new number if it was promoted.
        numbers = [entry.place[2] for entry in own[1:]]
        _require(numbers == sorted(numbers), "a run's requests are not in order of arrival (12)")
        _require(own[0].arrived <= own[-1].arrived, "a run's requests are not in order of arrival (12)")
    committed = {entry for entry in queued if entry.place[0] == COMMITTED_LEVEL}
    oldest = {own[0] for own in known.values()}
    _require(committed == oldest, "the committed requests are not the oldest requests of the runs (12)")


def _check_admission(scheduler: Scheduler) -> None:
    admission = scheduler._admission
    ahead = sum((meta.waiting + meta.running / 2) * meta.seconds for meta in admission._metas.values())
    _require(
        abs(admission.ahead - ahead) < 1e-6 * (1 + ahead),
        f"{admission.ahead} s of runs are expected to come first, not {ahead} (13)",
    )
    held_models = {state.name for state in scheduler._models.values() if state.held}
    stalled = {id for id, run in admission.live.items() if held_models.intersection(run.models)}
    _require(admission.stalled == stalled - admission.waiting.keys(), "a held model's runs take slots (13)")
    able = admission.waiting.keys() - stalled
    full = admission.closed or admission.slots_taken >= admission.limit
    _require(not able or full, "a waiting run could be admitted (13)")
    _require(admission.waiting.keys() <= admission.live.keys(), "a waiting run is not known (14)")
    _require(admission.live.keys().isdisjoint(scheduler._queues.live), "a run has the id of a request (14)")
    for name, meta in admission.snapshot().items():
        own = [id for id, run in admission.live.items() if run.meta == name]
        waiting = sum(id in admission.waiting for id in own)
        _require(
            (meta.waiting, meta.running) == (waiting, len(own) - waiting),
            f"the runs of {name!r} are counted wrongly (14)",
        )
    metas = admission.snapshot().values()
    ended = sum(meta.admitted + meta.expired + meta.refused + meta.withdrawn for meta in metas)
    _require(
        admission.run_count == ended + len(admission.waiting),
        f"{admission.run_count} runs were requested, and {ended} do not wait any more (14)",
    )
    for id in admission.waiting:
        deadline = admission.live[id].deadline
        _require(
            deadline is None or deadline > scheduler._now, "the deadline of a waiting run has passed (14)"
        )


def _check_executions(scheduler: Scheduler, states: list[ModelState]) -> None:
    running = list(scheduler._running.values())
    for running_one in running:
        execute = running_one.execute
        costs = running_one.model.queues[execute.variant].costs
        _require(execute.size in costs.sizes, f"the model has no such size: {execute} (6)", running_one.model)
        room = costs.capacities[costs.sizes.index(execute.size)]
        _require(execute.rows <= room, f"too many rows: {execute} (6)", running_one.model)
        _require(len(execute.requests) > 0, f"no requests: {execute} (6)", running_one.model)
        for request in execute.requests:
            variant = scheduler._queues.live[request].request.variant
            shorter = running_one.model.program.padded and variant < execute.variant
            _require(
                variant == execute.variant or shorter,
                f"request {request} has another variant: {execute} (6)",
                running_one.model,
            )
    for state in states:
        own = [
            execution
            for execution in (*running, *scheduler._residency.compaction.retries)
            if execution.model is state
        ]
        _require(state.executions == len(own), "the model's executions are not those in flight", state)
        requests = sum(len(execution.execute.requests) for execution in own)
        _require(state.executing == requests, "the model's executing requests are not those in flight", state)
    compaction = scheduler._residency.compaction
    held_up = bool(running) or not scheduler._residency.quiet
    _require(
        compaction.state is not CompactionState.DUE or held_up,
        "a compaction is due, but has not started although nothing prevents it",
    )
    reserved = sum(state.weights.state is WeightState.RESERVED for state in states)
    _require(scheduler._residency.accounts.reserved == reserved, "warm-ups are not counted (9)")
    again = any(execution.execute.again for execution in running)
    retried = compaction.retried
    warms_up = retried is not None and retried.weights.state is WeightState.RESERVED
    _require(
        (retried is not None and not warms_up) == again,
        "the compaction and the running executions disagree about the retry",
    )
    # A model whose weights were on the device when it was added may warm up at the same time.
    apart = len(running) + warms_up == 1 and scheduler._residency.accounts.loading is None
    _require(retried is None or apart, "a retry does not have the device to itself")
    exclusive = [execution for execution in running if execution.execute.exclusive]
    whole = len(running) == 1 and scheduler._residency.accounts.loading is None
    requests = sum(len(execution.execute.requests) for execution in exclusive)
    _require(not exclusive or (whole and requests == 1), "an exclusive request is not alone (16)")
    waits = scheduler._kept_exclusive and not exclusive
    _require(
        not waits or compaction.active or held_up or scheduler._is_closed,
        "an exclusive request waits for nothing (16)",
    )
    _require(not waits or scheduler._queues.exclusive > 0, "the device is kept for no request (16)")
    queued = sum(queue.exclusive for state in states for queue in state.queues.values())
    _require(scheduler._queues.exclusive == queued, "exclusive requests are not counted (16)")
    if not (running or scheduler._kept_exclusive or compaction.active or scheduler._is_closed):
        for state in states:
            ready = state.has_work and state.weights.state in RUNNABLE
            dispatchable = ready and state.dispatchable_at <= scheduler._now
            _require(not dispatchable, "the model could execute, but the device is idle (7)", state)


def _check_weights(scheduler: Scheduler, states: list[ModelState]) -> None:
    accounts, loads = scheduler._residency.accounts, scheduler._loads
    owners: dict[SharedTensorGroup, list[ModelWeights]] = {}
    for state in states:
        for group in state.weights.groups:
            owners.setdefault(group, []).append(state.weights)
    tensors: dict[Any, SharedTensorGroup] = {}
    for group, those in owners.items():
        users = [weights for weights in those if weights.state in TAKING_BYTES]
        _require(
            len(group.owners) == len(those) and set(group.owners) == set(those),
            "a group of tensors has wrong owners (8)",
        )
        _require(group.users == len(users), "a group of tensors has a wrong number of users (8)")
        _require(
            group.pins == sum(weights.pinned for weights in users),
            "a group of tensors has a wrong number of pins (8)",
        )
        _require(
            not group.tensors or group.bytes == sum(group.tensors.values()),
            "a group of tensors has a wrong number of bytes (8)",
        )
        _require(tensors.keys().isdisjoint(group.tensors), "a tensor is in two groups (8)")
        tensors |= dict.fromkeys(group.tensors, group)
    _require(accounts.groups.by_tensor() == tensors, "the known tensors are not those of the models (8)")
    for state in states:
        if state.program.tensors is not None:
            own = {key for group in state.weights.groups for key in group.tensors}
            _require(
                own == set(state.program.tensors), "the model's groups do not have its tensors (8)", state
            )
    held_bytes = sum(group.bytes for group in owners if group.users)
    pinned = sum(group.bytes for group in owners if group.pins)
    _require(
        accounts.bytes == held_bytes, f"{accounts.bytes} bytes are counted, but {held_bytes} are held (8)"
    )
    _require(
        accounts.pinned_bytes == pinned,
        f"{accounts.pinned_bytes} pinned bytes are counted, but {pinned} are pinned (8)",
    )
    for state in scheduler._models.values():
        if state.weights.state in ON_DEVICE and scheduler.settings.on_demand:
            latest = scheduler._now + max(state.program.idle_seconds, IDLE_CHECK_S)
            _require(
                scheduler._residency.idle_at <= latest,
                "the next check for idle weights is too late for the model (17)",
                state,
            )
    present = [state for state in states if state.weights.state in TAKING_BYTES]
    unpinned = [state for state in present if not state.weights.pinned]
    for state in states:
        _check_state(scheduler, state)
    counted = set(accounts.unpinned)
    _require(
        counted == {state.weights for state in unpinned},
        "the known unpinned weights are not those of the models (8)",
    )
    _require(
        not loads.victims_over_budget(scheduler._now),
        f"{held_bytes} bytes are held with a budget of {accounts.budget}, and weights could be evicted (8)",
    )
    loading = [state for state in states if state.weights.state is WeightState.LOADING]
    _require(len(loading) <= 1, "more than one load is in progress (9)")
    _require(
        accounts.loading is (loading[0].weights if loading else None),
        "the accounts have another load in progress (9)",
    )
    reading = [state.weights for state in states if state.weights.state is WeightState.READING]
    _require(reading == [accounts.reading] * len(reading), "the accounts have another read in progress (9)")
    _require(
        len(reading) == (accounts.reading is not None),
        "the accounts have a read in progress, but no model is being read (9)",
    )
    _require(
        all(state.on_disk for state in reading), "weights are being read that are already in host memory (9)"
    )
    waits = any(state.weights.on_disk for state in states if state.weights.state is WeightState.QUEUED)
    _require(bool(reading) or not waits, "the disk is free, but weights wait to be read (9)")
    first = loads.head()
    keeps = scheduler._kept_exclusive or scheduler._residency.compaction.active
    if not loading and first is not None and not keeps:
        planned, _ = loads.search(scheduler._models[first], scheduler._now)
        _require(planned is None, "the link is free, but weights wait to be loaded (9)")


def _check_state(scheduler: Scheduler, state: ModelState) -> None:
    """Check that the state of a model's weights follows from other facts (9), and that it fits the demands on it (10)."""
    loads, weights, name = scheduler._loads, state.weights, state.name
    where, reason = weights.state, loads.reason(name)
    absent = where not in TAKING_BYTES
    eviction = state in scheduler._residency.evictions
    backs_off = state in loads.backing_off
    waits = absent and where is not WeightState.READING
    _require(
        (where is WeightState.QUEUED) == (waits and reason is not None),
        "the state QUEUED does not match the lines (9)",
        state,
    )
    _require(
        (where is WeightState.BACKOFF) == (waits and reason is None and backs_off),
        "the state BACKOFF does not match the back-offs (9)",
        state,
    )
    leaves = where in RUNNABLE and (eviction or state.draining)
    _require(
        (where is WeightState.EVICTING) == leaves,
        "the state EVICTING does not match the evictions (9)",
        state,
    )
    demand = loads.demand_for_disk if weights.on_disk else loads.demand_for_link
    _require(
        (name in demand) == (state.has_work and absent),
        "the known demand does not match the model's work (9)",
        state,
    )
    other_line = loads.demand_for_link if weights.on_disk else loads.demand_for_disk
    _require(
        name not in other_line,
        "the model is in the line for the link, but waits for the disk, or vice versa (9)",
        state,
    )
    has_obstacle = where in (WeightState.QUEUED, WeightState.READING, WeightState.BACKOFF)
    _require(
        has_obstacle == bool(loads.obstacle(state, scheduler._now)),
        "the model's state does not match its obstacle (9)",
        state,
    )
    _require(name not in loads.required or absent, "a load is required for present weights (9)", state)
    if state.draining:
        _require(not eviction and reason is None, "a removed model is in a line (10)", state)
        return
    _require(
        name in loads.required or not (absent and state.needs_warm_up),
        "the model's warm-up is in no line (9)",
        state,
    )
    prefetched = name in loads.prefetched
    is_gone = absent or (where is WeightState.LOADING and scheduler._residency.accounts.abandoning)
    _require(
        not prefetched or where not in ON_DEVICE,
        "the model is in line to be prefetched, but on the device (10)",
        state,
    )
    in_line = prefetched or name in loads.required or weights.pinned
    _require(
        in_line or not is_gone or not weights.desired, "the weights are desired, but in no line (10)", state
    )
    _require(
        not eviction or not (weights.pinned or weights.desired),
        "an eviction of pinned or desired weights was requested (10)",
        state,
    )
    _require(not eviction or not absent, "an eviction of absent weights is planned (10)", state)
    stays = not evictable(state) or (state.has_work and weights.unserved)
    _require(not eviction or stays, "a requested eviction has no obstacle (10)", state)
    if not (scheduler.settings.on_demand or weights.desired):
        _require(not prefetched, "weights that are not desired are in line to be prefetched (10)", state)
        _require(where in ON_DEVICE or not state.queued, "requests wait for absent weights (10)", state)
        expected = is_gone or eviction or state.needs_warm_up or where is WeightState.RESERVED
        _require(expected, "weights are present without a cause (10)", state)


def _check_sums(scheduler: Scheduler, states: list[ModelState]) -> None:
    _require(not scheduler._queues.dirty, "an event left work undone")
    for state in states:
        before = (state.front, state.place, state.backlog_seconds, state.turn_seconds, state.dispatchable_at)
        state.recount()
        after = (state.front, state.place, state.backlog_seconds, state.turn_seconds, state.dispatchable_at)
        _require(
            before == after, f"the model's derived values were {before}, but should be {after} (11)", state
        )
    backlog = sum(state.backlog_seconds for state in states)
    turns = sum(state.turn_seconds for state in states)
    _require(
        isclose(scheduler._backlog, backlog, rel_tol=1e-6, abs_tol=1e-9),
        "the backlog is not the sum over the models (11)",
    )
    _require(
        isclose(scheduler._round, turns, rel_tol=1e-6, abs_tol=1e-9),
        "the round is not the sum over the models (11)",
    )


def _check_fair(fair: Fair) -> None:
    weight = sum(account.weight for account in fair._accounts.values() if account.present)
    _require(
        isclose(fair._weight, weight, rel_tol=1e-6, abs_tol=1e-9),
        "the weight is not the sum over the accounts (18)",
    )
    for name, account in fair._accounts.items():
        executing = sum(name == executing_name for executing_name, _ in fair._executing.values())
        _require(
            account.executing == executing, f"the account of {name!r} has a wrong number of executions (18)"
        )
        places = (fair._eligible, fair._ineligible, fair._idle_debtors, fair._waiting)
        listed = [name in ranking for ranking in places]
        _require(sum(listed) <= 1, f"{name!r} has more than one place (18)")
        # A model's work may end while the model waits and one of its executions runs. When this execution ends, the model
        # enters the mean if it owes device time.
        counted = any(listed[:3])
        _require(account.present or not counted, f"{name!r} does not count in the mean (18)")
        _require(counted or executing > 0 or not account.present, f"{name!r} counts without a cause (18)")
        _require(
            (account.waits_from is not None) == listed[3],
            f"{name!r} waits but is not listed, or vice versa (18)",
        )
