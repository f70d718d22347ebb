"""The service rsrv.control.v1.Control: the runtimes and the reconciler over gRPC. control.proto documents each call."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NoReturn, cast

import rsrv
from rsrv.control import load_messages, messages
from rsrv.control.aliases import alias_messages
from rsrv.control.card_memory import Cards
from rsrv.control.diagnosis import Diagnosis
from rsrv.control.grpc_service import InvalidArgument, StatusError, answers, member, member_name, steers
from rsrv.control.live import Live
from rsrv.control.metrics import Metrics
from rsrv.control.placing import Placing
from rsrv.control.prewarming import Prewarming
from rsrv.control.reconciler import STARTUP_POLL_S, Reconciler, ReloadError
from rsrv.control.records import RuntimeRecords, starting
from rsrv.control.runtime_link import RuntimeAsleep, RuntimeDown
from rsrv.control.runtime_state import StateChange, StateSnapshot, StateUpdate, Subscription
from rsrv.control.runtimes import Answers, Runtimes
from rsrv.control.settings_file import SettingsFile
from rsrv.control.stub_monitor import stub_processes
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.desired import PauseMode
from rsrv.settings import SettingsError
from rsrv.settings_changes import CHANGEABLE, read_shares
from rsrv.text import by_number
from rsrv_gen.write import front_of

#: Seconds between two checks for failures of bundles.
_FAILURES_POLL_S = 0.25
#: Folder of the runtimes' profiles.
PROFILES = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "rsrv/profiles")


@dataclass(frozen=True, slots=True)
class ControlledServer:
    """The tritonserver of the control process."""

    pid: int
    file: SettingsFile
    prewarming: Prewarming

    @property
    def repository(self) -> Path:
        return self.file.path.parent


@dataclass(frozen=True, slots=True)
class Monitoring:
    """The sources of the figures that the service returns."""

    metrics: Metrics
    live: Live
    cards: Cards
    diagnosis: Diagnosis


class ControlService(control_pb2_grpc.ControlServicer):
    def __init__(
        self,
        server: ControlledServer,
        runtimes: Runtimes,
        lifecycle: Reconciler,
        placing: Placing,
        monitoring: Monitoring,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._server = server
        #: Held while runtimes are restarted, put to sleep or woken.
        self._changing = asyncio.Lock()
        #: Held while an alias is changed, because a change that fails restores all earlier aliases.
        self._changing_alias = asyncio.Lock()
        self._runtimes = runtimes
        self._lifecycle = lifecycle
        self._placing = placing
        self._monitoring = monitoring
        self._clock = clock

    # --- the state ------------------------------------------------------------------------------------------

    @answers
    async def GetStatus(self, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        runtimes = self._runtimes
        records = await runtimes.records(whole=True)
        entries = runtimes.entries
        by_device = {
            number: messages.by_name(link.state.entries)
            for number, link in enumerate(runtimes.links)
            if link.up or link.asleep_since is not None
        }
        failures = self._lifecycle.failures
        # Take names from the versions as well, because a model that is not built yet or could not be built has no record.
        names = {
            kind: {
                model.name
                for record in records.values()
                for model in record.models.values()
                if model.meta == (kind == "meta")
            }
            | {entry["name"] for entry in entries.values() if entry["kind"] == kind}
            for kind in ("model", "meta")
        }
        # A cold model counts as a model, because only its start shows whether it is a meta model.
        steps = starting(records.values())
        if awaited := runtimes.awaited:
            # While a stub imports model.py, it does not notice the end of its runtime. It connects to the next runtime after
            # the import.
            repository = self._server.repository.absolute()
            living = await asyncio.to_thread(stub_processes, self._server.pid, repository)
            steps |= dict.fromkeys(awaited & living, "its process reconnects")
        names["model"] |= (runtimes.cold | steps.keys()) - names["meta"]
        aliases = self._lifecycle.aliases
        front = ""
        if request.model in names["model"] | names["meta"]:
            # The model's directory may be gone, or may belong to another program.
            with suppress(OSError):
                front = await asyncio.to_thread(front_of, self._server.repository / request.model)
        chosen = {request.model, f"aliases.{request.model}", *aliases.get(request.model, ())}
        if request.model and not any(
            request.model in known for known in (*names.values(), failures, aliases)
        ):
            raise StatusError("NOT_FOUND", f"there is no model {request.model!r}")

        def wanted(names: Iterable[str]) -> list[str]:
            return sorted((name for name in names if not request.model or name in chosen), key=by_number)

        known = {**await runtimes.last_records(), **records}

        def status(name: str, policy: pb.Policy | None) -> pb.ModelStatus:
            return messages.model_status(
                name,
                {number: record.models[name] for number, record in known.items() if name in record.models},
                {number: models[name] for number, models in by_device.items() if name in models},
                policy,
                steps.get(name, ""),
                self._lifecycle.bundle_state(name),
                front if name == request.model else "",
            )

        cards, now = await self._monitoring.cards.memory(), self._clock()
        return pb.GetStatusResponse(
            server=pb.Server(
                pid=self._server.pid,
                control_pid=os.getpid(),
                version=rsrv.__version__,
                mode=member(pb.Mode, self._server.file.settings.lifecycle.mode),
                repository=str(self._server.repository),
                settings_notes=self._server.file.notes,
            ),
            devices=[
                messages.device_status(
                    number,
                    link,
                    records[number].device if number in records else None,
                    cards.get(number),
                    now,
                )
                for number, link in enumerate(runtimes.links)
            ],
            scheduler=self._scheduler(records),
            models=[
                status(
                    name, messages.policy(self._server.file.settings, name, runtimes.desired.overridden(name))
                )
                for name in wanted(names["model"])
            ],
            metas=[status(name, None) for name in wanted(names["meta"])],
            failures=[messages.failure(name, failures[name]) for name in wanted(failures)],
            findings=map(messages.finding, () if request.model else self._monitoring.diagnosis.findings),
            aliases=alias_messages(
                {
                    name: shares
                    for name, shares in aliases.items()
                    if request.model in ("", name) or request.model in shares
                },
                self._lifecycle.reasons,
                known.values(),
            ),
        )

    @answers
    async def Diagnose(self, request: pb.DiagnoseRequest) -> pb.DiagnoseResponse:
        diagnosis = self._monitoring.diagnosis
        _, seconds = await diagnosis.update()
        return pb.DiagnoseResponse(findings=map(messages.finding, diagnosis.findings), seconds=seconds)

    @answers
    async def GetMemory(self, request: pb.GetMemoryRequest) -> pb.GetMemoryResponse:
        records = await self._runtimes.records(whole=True)
        if not records:
            raise RuntimeAsleep
        budget = self._server.file.settings.runtime.weight_budget_bytes
        return pb.GetMemoryResponse(
            devices=[
                messages.memory_use(number, record, budget) for number, record in sorted(records.items())
            ]
        )

    @answers
    async def GetLoad(self, request: pb.GetLoadRequest) -> pb.GetLoadResponse:
        records = await self._runtimes.read_records(_positions(request))
        return load_messages.load(
            range(len(self._runtimes.links)), records, self._placing.mode, self._lifecycle.aliases
        )

    @answers
    async def GetMetrics(self, request: pb.GetMetricsRequest) -> pb.GetMetricsResponse:
        return pb.GetMetricsResponse(text=await self._monitoring.metrics.text())

    @answers
    async def GetHistory(self, request: pb.GetHistoryRequest) -> pb.GetHistoryResponse:
        return messages.history(await self._ask_about(_model(request.model), "history"))

    async def _ask_about(self, model: str, command: str) -> Answers:
        """Send the runtimes a command about a model. If no runtime has the model, the StatusError gives the reason."""
        try:
            return await self._runtimes.query({"command": command, "model": model})
        except StatusError as unknown:
            if unknown.code != "NOT_FOUND":
                raise
            if self._runtimes.presence.waits(model):
                text = f"{model} is cold: a request or `rsrv prefetch --warm {model}` starts the model"
            elif failure := self._lifecycle.failures.get(model):
                text = f"{model} has failed: {failure.text}"
            else:
                raise
            raise StatusError("FAILED_PRECONDITION", text) from None

    @answers
    async def GetRequests(self, request: pb.GetRequestsRequest) -> pb.GetRequestsResponse:
        if bool(request.model) == bool(request.request):
            _refuse("name either a model or a request")
        if request.model:
            answers_of_devices = await self._ask_about(request.model, "slowest")
        else:
            answers_of_devices = await self._runtimes.query({"command": "find", "request": request.request})
        slow_requests = [
            messages.slow_request(slow, answer["unix_s"], number)
            for number, answer in answers_of_devices.items()
            for slow in answer["requests"]
        ]
        slow_requests.sort(
            key=(lambda slow: -slow.seconds) if request.model else (lambda slow: slow.arrived_unix_s)
        )
        return pb.GetRequestsResponse(requests=slow_requests)

    @answers
    async def GetTimeline(self, request: pb.GetTimelineRequest) -> pb.GetTimelineResponse:
        timelines = await self._runtimes.read_on("timeline", _positions(request))
        return messages.timeline(timelines, self._clock())

    @answers
    async def GetArrivals(self, request: pb.GetArrivalsRequest) -> pb.GetArrivalsResponse:
        return messages.arrivals(await self._runtimes.read_on("arrivals", _positions(request)))

    async def WatchPage(
        self, request: pb.WatchPageRequest, context: Any
    ) -> AsyncIterator[pb.WatchPageResponse]:
        async with aclosing(self._monitoring.live.watch()) as events:
            async for event in events:
                yield pb.WatchPageResponse(event=event.name, json=event.json)

    async def WatchState(
        self, request: pb.WatchStateRequest, context: Any
    ) -> AsyncIterator[pb.WatchStateResponse]:
        feed, sent = self._runtimes.subscribe(), pb.Failures()
        clock = asyncio.get_running_loop().time
        due = clock()
        try:
            while True:
                if clock() >= due:
                    # Read the failures again after some time, because no event announces them.
                    due = clock() + _FAILURES_POLL_S
                    failures_shown = self._lifecycle.failures
                    failures = pb.Failures(
                        failures=[
                            messages.failure(name, failures_shown[name]) for name in sorted(failures_shown)
                        ]
                    )
                    if failures != sent:
                        sent = failures
                        yield pb.WatchStateResponse(failures=failures)
                try:
                    async with asyncio.timeout_at(due):
                        device, update = await feed.next()
                except TimeoutError:
                    continue
                yield messages.update(device, update)
        finally:
            feed.close()

    # --- weights --------------------------------------------------------------------------------

    @steers
    async def SetResidency(self, request: pb.SetResidencyRequest) -> pb.SetResidencyResponse:
        model = _model(request.model)
        residency = member_name(pb.Residency, request.residency, "residency")
        if request.wait and residency != "device":
            raise InvalidArgument("wait needs the residency device")
        names, desired = await self._runtimes.named(model), self._runtimes.desired
        await self._load_weights(lambda: desired.set_residency(names, residency), model, request.wait)
        return pb.SetResidencyResponse()

    @steers
    async def Prefetch(self, request: pb.PrefetchRequest) -> pb.PrefetchResponse:
        model, runtimes = _model(request.model), self._runtimes
        names = await runtimes.named(model)
        devices = runtimes.chosen(request.devices or runtimes.placement.get(model)).keys()
        await self._load_weights(
            lambda: runtimes.desired.prefetch(names, devices), model, request.wait, devices
        )
        return pb.PrefetchResponse()

    @steers
    async def Start(self, request: pb.StartRequest) -> pb.StartResponse:
        if bool(request.models) == request.all:
            raise InvalidArgument("name models, or set all")
        try:
            models = await self._server.prewarming.start(request.models, poll=request.poll)
        except LookupError as error:
            raise StatusError("NOT_FOUND", str(error.args[0])) from None
        return pb.StartResponse(models=models)

    async def _load_weights(
        self, change: Callable[[], None], model: str, wait: bool, devices: Collection[int] | None = None
    ) -> None:
        subscriptions = [link.state.subscribe() for link in self._runtimes.links]
        try:
            # Read the state before the command is sent, because the load may begin and fail before the command is answered.
            before = [subscription.take() for subscription in subscriptions]
            followed = await self._runtimes.change(change, devices)
            if wait:
                serving = [number for number in followed if _serves(before[number], model)]
                if not serving:
                    text = f"{model} is cold: its weights will be loaded when a request or `rsrv prefetch --warm {model}` starts the model"
                    raise StatusError("FAILED_PRECONDITION", text)
                waits = (_until_resident(before[number], subscriptions[number], model) for number in serving)
                ended = await asyncio.gather(*waits, return_exceptions=True)
                # If other devices have loaded the weights, ignore a runtime that has died: the next runtime loads the weights.
                failed = [error for error in ended if error is not None]
                failed.sort(key=lambda error: isinstance(error, RuntimeDown))
                if failed and (len(failed) == len(ended) or not isinstance(failed[0], RuntimeDown)):
                    raise failed[0]
        finally:
            for subscription in subscriptions:
                subscription.close()

    @steers
    async def Evict(self, request: pb.EvictRequest) -> pb.EvictResponse:
        model, runtimes = _target(request.target), self._runtimes
        names = None if model is None else await runtimes.named(model)
        answers: Answers = {}
        try:
            # Send the command before the document. Otherwise, the runtime would evict the models because of the document, and
            # this answer would not list them.
            answers = await runtimes.command({"command": "evict", "model": model}, request.devices)
        except StatusError as error:
            if error.code != "NOT_FOUND":  # a cold model has no weights to evict
                raise
        devices = runtimes.chosen(request.devices).keys()
        await runtimes.change(lambda: runtimes.desired.evict(names, devices), devices)
        return pb.EvictResponse(
            models=sorted({name for answer in answers.values() for name in answer["models"]})
        )

    @steers
    async def Compact(self, request: pb.CompactRequest) -> pb.CompactResponse:
        await self._runtimes.command({"command": "compact"})
        return pb.CompactResponse()

    @answers
    async def GetPlacement(self, request: pb.GetPlacementRequest) -> pb.GetPlacementResponse:
        placing = self._placing
        if placing.packs:
            trial = await placing.trial(request.without_devices, request.without_models, request.added)
            return messages.placement(placing.mode, placing.generation, trial)
        if request.without_devices or request.without_models or request.added:
            raise StatusError(
                "FAILED_PRECONDITION",
                "this server does not place models, because it has one device or its placement.mode is not lpt_packing",
            )
        return pb.GetPlacementResponse(
            mode=placing.mode,
            generation=placing.generation,
            models=[
                pb.PlacedModel(name=name, devices=devices)
                for name, devices in sorted(self._runtimes.placement.items())
            ],
        )

    @steers
    async def SetPlacement(self, request: pb.SetPlacementRequest) -> pb.SetPlacementResponse:
        placed = {_model(model.model): list(model.devices) for model in request.models}
        return pb.SetPlacementResponse(generation=self._placing.impose(placed))

    # --- scheduling --------------------------------------------------------------------------------------

    @steers
    async def SetPolicy(self, request: pb.SetPolicyRequest) -> pb.SetPolicyResponse:
        policy = messages.given(request.policy)
        if not policy:
            raise InvalidArgument("policy must have at least one of weight, max_delay_us, max_queue_depth")
        model, runtimes = _model(request.model), self._runtimes
        # Include the meta model itself: its policy limits the runs that may wait.
        names = {model, *await runtimes.named(model)}
        await runtimes.change(lambda: runtimes.desired.set_models(names, policy))
        return pb.SetPolicyResponse()

    @steers
    async def SetScheduler(self, request: pb.SetSchedulerRequest) -> pb.SetSchedulerResponse:
        changes = messages.scheduler_changes(request.scheduler)
        for key in changes:
            if key not in CHANGEABLE:
                raise InvalidArgument(
                    f"{key} cannot be changed while the server runs; only {', '.join(CHANGEABLE)} can"
                )
        desired = self._runtimes.desired
        await self._runtimes.change(lambda: desired.configure(changes))
        return pb.SetSchedulerResponse(scheduler=self._scheduler(await self._runtimes.records()))

    def _scheduler(self, records: Mapping[int, RuntimeRecords]) -> pb.Scheduler:
        """Return the section scheduler. Its `depth` is the number that the first runtime uses."""
        section = self._runtimes.desired.scheduler
        return messages.scheduler(
            section | ({"depth": records[min(records)].device.depth} if records else {})
        )

    @steers
    async def Pause(self, request: pb.PauseRequest) -> pb.PauseResponse:
        mode = member_name(pb.Pause, request.mode, "mode")
        await self._pause(request.target, cast(PauseMode, mode))
        return pb.PauseResponse()

    @steers
    async def Continue(self, request: pb.ContinueRequest) -> pb.ContinueResponse:
        await self._pause(request.target, None)
        return pb.ContinueResponse()

    async def _pause(self, target: pb.Target, mode: PauseMode | None) -> None:
        model, runtimes = _target(target), self._runtimes
        names = None if model is None else await runtimes.named(model)
        await runtimes.change(lambda: runtimes.desired.pause(names, mode))

    @steers
    async def Abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        if not request.request_id:
            raise InvalidArgument("request_id is empty")
        answers = await self._runtimes.command({"command": "abort", "request": request.request_id})
        return pb.AbortResponse(
            aborted=sum(answer["aborted"] for answer in answers.values()),
            executing=sum(answer["executing"] for answer in answers.values()),
        )

    # --- the runtimes ---------------------------------------------------------------------------------------

    @steers
    async def Restart(self, request: pb.RestartRequest) -> pb.RestartResponse:
        chosen = self._to_drain(request)
        async with self._changing:
            try:
                await self._server.file.read()
            except SettingsError as error:
                raise StatusError("FAILED_PRECONDITION", f"nothing was restarted: {error}") from None
            if self._server.file.config_error:
                reason = f"nothing was restarted: {self._server.file.config_error}"
                raise StatusError("FAILED_PRECONDITION", reason)
            answer = pb.RestartResponse()
            for number in chosen:
                result = await self._runtimes.restart(number, request.drain_s, force=request.force)
                if result.missing:
                    raise StatusError(
                        "ABORTED",
                        f"device {number} was restarted, but {', '.join(result.missing)} did not return; rsrv status and the "
                        "server's log have the reason. Devices with higher numbers were not restarted",
                    )
                answer.devices.add(number=number, first_s=result.first_s, all_s=result.all_s)
                self._server.file.restarted(number)
        return answer

    @steers
    async def Sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        chosen = self._to_drain(request)
        async with self._changing:
            for number in chosen:
                await self._runtimes.sleep(number, request.drain_s, force=request.force)
        return pb.SleepResponse(devices=chosen)

    @steers
    async def Wake(self, request: pb.WakeRequest) -> pb.WakeResponse:
        chosen = self._runtimes.chosen(request.devices)
        answer = pb.WakeResponse()
        # If a sleep is in progress, wait for its end, because the caller may not know about it.
        async with self._changing:
            for number in chosen:
                answer.devices.add(number=number, seconds=await self._runtimes.wake(number))
        return answer

    def _to_drain(self, request: pb.RestartRequest | pb.SleepRequest) -> Collection[int]:
        """Return the devices whose runtimes the request shall end. Raises StatusError."""
        if not 0 <= request.drain_s < inf:
            raise InvalidArgument("drain_s must be a number of seconds, at least 0")
        chosen = self._runtimes.chosen(request.devices)
        if self._changing.locked():
            raise StatusError(
                "FAILED_PRECONDITION",
                "another restart, sleep or wake is in progress; wait until it has ended",
            )
        return chosen

    # --- bundles and profiles -----------------------------------------------------------------------------

    @steers
    async def ReloadWeights(self, request: pb.ReloadWeightsRequest) -> pb.ReloadWeightsResponse:
        model = _model(request.model)
        section, loop = self._server.file.settings.lifecycle, asyncio.get_running_loop()
        # Retry for some time. A client that has just copied a bundle may call this before two scans agree that the bundle is
        # whole. The scans begin only when the reconciler has found that the server serves.
        deadline = loop.time() + STARTUP_POLL_S + section.slow_poll_s + 3 * section.poll_s
        while True:
            try:
                await self._lifecycle.reload(model)
                break
            except ReloadError as error:
                if error.code != "UNAVAILABLE" or loop.time() > deadline:
                    raise
            await asyncio.sleep(section.poll_s)
        await self._until_tried(model)
        versions = messages.by_name(self._runtimes.entries).get(model, {})
        return pb.ReloadWeightsResponse(versions=messages.version_list(versions))

    @steers
    async def SetAlias(self, request: pb.SetAliasRequest) -> pb.SetAliasResponse:
        name, desired = request.alias.name, self._runtimes.desired
        if request.HasField("alias"):
            targets = request.alias.targets
            raw = {target.model: "shadow" if target.shadow else target.weight for target in targets}
            if len(raw) < len(targets):
                raise InvalidArgument("a model is named twice in the alias: name each model once")
            try:
                shares = read_shares(_model(name), raw) if raw else None
            except SettingsError as error:
                raise InvalidArgument(str(error)) from None
            async with self._changing_alias:
                if shares is None and name not in self._lifecycle.aliases:
                    raise StatusError("NOT_FOUND", f"there is no alias {name!r}")
                before = desired.overrides.aliases
                # Set the alias in the document first. Otherwise, a change of rsrv.yaml at this time could undo the change.
                desired.set_aliases({**before, name: shares})
                try:
                    await self._lifecycle.change_alias(name, shares)
                except BaseException:
                    desired.set_aliases(before)
                    raise
        return pb.SetAliasResponse(aliases=alias_messages(self._lifecycle.aliases, self._lifecycle.reasons))

    async def _until_tried(self, model: str) -> None:
        """Wait until no device is loading a version of the model.

        This is necessary because Triton's load ends when the first device serves, and waits only some seconds for the others.
        """
        while True:
            seen = self._runtimes.changes
            versions = (
                entry for link in self._runtimes.live.values() for entry in link.state.entries.values()
            )
            if not any(version["name"] == model and version["state"] == "loading" for version in versions):
                return
            await self._runtimes.wait_change(seen)

    @steers
    async def StartProfile(self, request: pb.StartProfileRequest) -> pb.StartProfileResponse:
        moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._clock()))
        parent = self._profiles()
        # The name of the directory contains the server's pid. So StopProfile finds the profile even if an earlier control
        # process started it.
        directory = parent / f"{moment}-{self._server.pid}"
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StatusError(
                "FAILED_PRECONDITION",
                f"the profile cannot be written: {error}; the server's variable XDG_CACHE_HOME can name another folder",
            ) from None
        live = self._runtimes.live
        folders = (
            {number: directory / str(number) for number in live} if len(self._runtimes.links) > 1 else {}
        )
        await self._runtimes.slow_command(
            {
                number: {"command": "profile", "directory": str(folders.get(number, directory))}
                for number in live
            }
        )
        return pb.StartProfileResponse(directory=str(directory))

    @steers
    async def StopProfile(self, request: pb.StopProfileRequest) -> pb.StopProfileResponse:
        await self._runtimes.slow_command({number: {"command": "profile"} for number in self._runtimes.live})
        folders = sorted(self._profiles().glob(f"*-{self._server.pid}"))
        return pb.StopProfileResponse(directory=str(folders[-1]) if folders else "")

    def _profiles(self) -> Path:
        return PROFILES.expanduser().absolute()


def _positions(
    request: pb.GetLoadRequest | pb.GetTimelineRequest | pb.GetArrivalsRequest,
) -> dict[int, tuple[str, int]]:
    return {position.device: (position.instance, position.next) for position in request.positions}


def _model(name: str) -> str:
    return name or _refuse("model is empty")


def _target(target: pb.Target) -> str | None:
    """Return the name of the target model, or None if the target is all models."""
    if target.WhichOneof("target") == "model":
        return _model(target.model)
    return None if target.all else _refuse("target must be a model, or all")


def _refuse(text: str) -> NoReturn:
    raise InvalidArgument(text)


def _serves(update: StateUpdate, model: str) -> bool:
    """Return True if the device of this update has a version of the model that has not failed."""
    return isinstance(update, StateSnapshot) and any(
        entry["name"] == model and entry["state"] != "failed" for entry in update.entries.values()
    )


async def _until_resident(update: StateUpdate, subscription: Subscription, model: str) -> None:
    """Wait until the weights of a model, or of the models that a meta model calls, are resident.

    `update` is the first update. Raises RuntimeDown, or StatusError if a load began and did not succeed.
    """
    entries: dict[str, Any] = {}
    loading: set[str] = set()
    while True:
        match update:
            case None:
                raise RuntimeDown
            case StateSnapshot(entries=found):
                entries = dict(found)
            case StateChange(key=key, entry=None):
                entries.pop(key, None)
            case StateChange(key=key, entry=entry):
                entries[key] = entry
        mine = [
            key for key, entry in entries.items() if entry["name"] == model and entry["state"] != "failed"
        ]
        awaited = {k for key in mine for k in (entries[key]["models"] or [key]) if k in entries}
        if not awaited:
            raise StatusError("ABORTED", f"the model {model!r} was removed in the meantime")
        weights = {key: entries[key]["weights"] for key in awaited if entries[key]["state"] != "leaving"}
        if all(where == "resident" for where in weights.values()):
            return
        if any(where == "absent" and key in loading for key, where in weights.items()):
            raise StatusError(
                "ABORTED",
                f"the load of the weights of {model!r} failed, or the weights were evicted; see `rsrv history {model}`",
            )
        loading |= {key for key, where in weights.items() if where == "loading"}
        update = await subscription.next()
