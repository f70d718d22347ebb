"""What the owner of the scheduler must not do: events that contradict earlier ones are refused before they change anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rsrv.scheduler.disciplines import Discipline
from rsrv.scheduler.errors import CallerError
from rsrv.scheduler.events import (
    Event,
    Evict,
    ExecutionFinished,
    LoadAbandoned,
    LoadFailed,
    ModelAdded,
    ModelRemoved,
    Paused,
    Pinned,
    PolicyChanged,
    Prefetch,
    RequestsArrived,
    RunsAsked,
    SettingsChanged,
    WarmUpEnded,
    WeightsLoaded,
)
from rsrv.scheduler.model import check_program, with_policy
from rsrv.scheduler.settings import SchedulerSettings

if TYPE_CHECKING:
    from rsrv.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler, event: Event, now: float) -> None:
    """Refuse an event that breaks the contract of `events`.

    Raises:
        CallerError: it does, or time runs backwards.
    """
    if not now >= scheduler._now:
        raise CallerError(f"time runs backwards: {now} after {scheduler._now}")
    match event:
        case RequestsArrived():
            scheduler._queues.check(event.requests, scheduler._gate.live.keys())
        case ExecutionFinished():
            running = scheduler._running
            if event.dispatch not in running:
                flying = [one.execute.dispatch for one in running]
                raise CallerError(f"dispatch {event.dispatch} is not in flight: {flying} are")
        case RunsAsked():
            scheduler._gate.check(event.runs, scheduler._queues.live.keys())
        case ModelAdded():
            check_program(event.program)
            scheduler._memory.weights.pieces.check(event.program.tensors or {})
            name = event.program.model
            if name in scheduler._models:
                raise CallerError(f"model {name!r} is loaded already: remove it first")
            if name in scheduler._draining:
                raise CallerError(f"model {name!r} is draining: add it again after its EvictWeights")
        case SettingsChanged():
            check_settings(event.settings, scheduler._disciplines)
        case ModelRemoved() | Pinned() | Prefetch():
            _check_models(scheduler, event.model)
        case Paused() | Evict():
            _check_models(scheduler, *event.models)
        case PolicyChanged():
            _check_models(scheduler, event.model)
            check_program(with_policy(scheduler._models[event.model].program, event))
        case WarmUpEnded():
            warming = scheduler._models.get(event.model) or scheduler._draining.get(event.model)
            compaction = scheduler._memory.compaction
            if warming is None or not warming.warming or warming in compaction.warm_ups:
                raise CallerError(f"model {event.model!r} is not being warmed up")
        case WeightsLoaded() | LoadFailed() | LoadAbandoned():
            scheduler._memory.weights.check_epoch(event.model, event.epoch)
        case _:
            pass


def check_settings(settings: SchedulerSettings, disciplines: Mapping[str, Callable[[], Discipline]]) -> None:
    """Refuse settings that name no discipline there is.

    Raises:
        CallerError: they do. (What else may be wrong with them, they check themselves.)
    """
    if settings.discipline not in disciplines:
        raise CallerError(f"discipline must be one of {sorted(disciplines)}, not {settings.discipline!r}")


def _check_models(scheduler: Scheduler, *names: str) -> None:
    for name in names:
        if name not in scheduler._models:
            raise CallerError(f"there is no model {name!r}")
