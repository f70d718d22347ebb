"""The subcommands of `rsrv` that ask a server."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import NoReturn

import grpc

from rsrv.cli import device_pages, history, top
from rsrv.cli import server_pages as pages
from rsrv.cli.changes import key_and_value, set_field
from rsrv.cli.client import LONG_TIMEOUT_S, CommandLineError, Server, carry_out
from rsrv.cli.output import is_terminal, print_json
from rsrv.cli.recording import read_spans, run_record
from rsrv.control import find
from rsrv.control.chrome_trace import chrome_trace
from rsrv.control.grpc_service import member
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.progress import steps
from rsrv.text import one_line
from rsrv.units import parse_size

#: Seconds between two checks of models that start.
_WARM_POLL_S = 0.25
#: Seconds between two pages of `rsrv status --watch`.
_WATCH_S = 2.0
#: Exit statuses of `rsrv doctor`.
_STATUSES = {pb.SEVERITY_WARNING: 1, pb.SEVERITY_CRITICAL: 3}


def run(options: argparse.Namespace) -> int:
    """Carry out a command that asks a server, and return its exit status."""
    return carry_out(options, _COMMANDS[options.command], pb, control_pb2_grpc.ControlStub, find.address)


def _target(options: argparse.Namespace) -> pb.Target:
    return pb.Target(all=True) if options.all else pb.Target(model=options.model)


def _target_name(options: argparse.Namespace) -> str:
    return "all models" if options.all else str(options.model)


#: A status, and the function that prints its page.
_StatusPage = tuple[pb.GetStatusResponse, Callable[[pb.GetStatusResponse], None]]


def _status(server: Server) -> int:
    if server.options.watch:
        return _watch_status(server)
    server.show(*_ask_status(server))
    if server.options.bare and not server.json:
        print("\n`rsrv --help` lists the commands.")
    return 0


def _watch_status(server: Server) -> NoReturn:
    """Show the status regularly. A terminal shows only the latest page. JSON has an object per line."""
    status: _StatusPage | None = _ask_status(server)
    while True:
        if status is not None:
            answer, page = status
            if server.json:
                print_json(answer, line=True)
            else:
                print("\x1b[H\x1b[2J" if is_terminal() else time.strftime("\n%H:%M:%S"), flush=True)
                page(answer)
                sys.stdout.flush()
        time.sleep(_WATCH_S)
        try:
            status = _ask_status(server)
        except grpc.RpcError as error:
            # Try again at the next update, because a new runtime may answer.
            status = None
            print(one_line(error.details() or error.code().name), file=sys.stderr, flush=True)


def _ask_status(server: Server) -> _StatusPage:
    """Return the status that the options ask for, and the page that shows it."""
    model = server.options.model
    if any(mark in model for mark in "*?["):
        answer = server.ask("GetStatus", pb.GetStatusRequest())
        aliases = [alias for alias in answer.aliases if fnmatchcase(alias.name, model)]
        behind = {target.model for alias in aliases for target in alias.targets}
        # Also show the models behind a matching alias.
        models, metas, failures = (
            [shown for shown in kind if shown.name in behind or fnmatchcase(shown.name, model)]
            for kind in (answer.models, answer.metas, answer.failures)
        )
        if not models and not metas and not failures and not aliases:
            raise CommandLineError(f"no model matches {model!r}")
        for field in ("models", "metas", "failures", "aliases"):
            answer.ClearField(field)
        answer.models.extend(models)
        answer.metas.extend(metas)
        answer.failures.extend(failures)
        answer.aliases.extend(aliases)
        return answer, pages.pattern_page
    answer = server.ask("GetStatus", pb.GetStatusRequest(model=model))
    if any(alias.name == model for alias in answer.aliases):
        return answer, lambda shown: pages.alias_status_page(shown, model)
    if model:
        return answer, lambda shown: pages.model_page(shown, _memory_of_models(server))
    return answer, pages.status_page


def _memory_of_models(server: Server) -> pb.GetMemoryResponse | None:
    """Return the memory of all models, which shows the tensors that they share, or None if no runtime answers."""
    with suppress(grpc.RpcError):
        answer: pb.GetMemoryResponse = server.ask("GetMemory", pb.GetMemoryRequest())
        return answer
    return None


def _memory(server: Server) -> int:
    return server.show(server.ask("GetMemory", pb.GetMemoryRequest()), device_pages.memory_page)


def _doctor(server: Server) -> int:
    answer = server.ask("Diagnose", pb.DiagnoseRequest())
    server.show(answer, pages.doctor_page)
    return max((_STATUSES.get(finding.severity, 0) for finding in answer.findings), default=0)


def _health(server: Server) -> int:
    return server.health(lambda status: "; ".join(pages.reasons(status)))


def _load(server: Server) -> int:
    return server.show(server.ask("GetLoad", pb.GetLoadRequest()), device_pages.load_page)


def _timeline(server: Server) -> int:
    spans = read_spans(server)
    since = max((_end(span) for span in spans), default=0.0) - server.options.seconds
    text = json.dumps(chrome_trace(span for span in spans if _end(span) >= since))
    output = server.options.output
    if output is None:
        print(text)
    else:
        output.write_text(text)
        print(f"{output}: open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def _end(span: pb.Span) -> float:
    return span.start_unix_s + span.seconds


def _watch(server: Server) -> int:
    for update in server.stream("WatchState", pb.WatchStateRequest()):
        if server.json:
            print_json(update, line=True)
        else:
            pages.print_update(update)
    return 0


def _top(server: Server) -> int:
    stream = server.stream("WatchPage", pb.WatchPageRequest())
    (top.print_events if server.json else top.show)((event.event, event.json) for event in stream)
    return 0


def _set_residency(server: Server, residency: str, wait: bool = False) -> int:
    model = server.options.model
    request = pb.SetResidencyRequest(model=model, residency=member(pb.Residency, residency), wait=wait)
    call = "SetResidency"
    answer = server.wait(call, request, f"{model}: loading weights") if wait else server.ask(call, request)
    return server.done(answer, f"{model}: residency {residency}")


def _prefetch(server: Server) -> int:
    options = server.options
    if options.warm:
        return _warm(server)
    if options.all or len(options.model) != 1:
        raise CommandLineError("name one model, or start several with --warm")
    # Store the single name in the options, as other commands do, so that an error names the most similar model.
    (options.model,) = options.model
    model, wait = options.model, options.wait
    call, request = "Prefetch", pb.PrefetchRequest(model=model, wait=wait, devices=_devices(server))
    answer = server.wait(call, request, f"{model}: loading weights") if wait else server.ask(call, request)
    return server.done(answer, f"{model}: the weights {'are on the device' if wait else 'will be loaded'}")


def _warm(server: Server) -> int:
    """Start models, show how many are warm, and return when all have started or failed."""
    options = server.options
    if options.wait or options.device or bool(options.model) == options.all:
        raise CommandLineError("--warm takes models or --all, but neither --wait nor --device")
    answer = server.ask("Start", pb.StartRequest(models=options.model, all=options.all))
    ended: set[str] = set()
    with steps("models started", len(answer.models)) as progress:
        while True:
            for shown in answer.models:
                if shown.state in ("warm", "failed") and shown.name not in ended:
                    ended.add(shown.name)
                    progress.step(shown.name)
            if len(ended) >= len(answer.models):
                break
            time.sleep(_WARM_POLL_S)
            answer = server.ask("Start", pb.StartRequest(models=options.model, all=options.all, poll=True))
    failed = [shown for shown in answer.models if shown.state == "failed"]
    for shown in failed:
        print(f"{shown.name}: {shown.error}", file=sys.stderr)
    status = server.done(
        answer, f"{len(answer.models) - len(failed)} of {len(answer.models)} models are warm"
    )
    return int(bool(failed)) or status


def _devices(server: Server) -> list[int]:
    devices: list[int] = server.options.device or []
    if min(devices, default=0) < 0:
        raise CommandLineError("--device is a number from 0")
    return devices


def _evict(server: Server) -> int:
    answer = server.ask("Evict", pb.EvictRequest(target=_target(server.options), devices=_devices(server)))
    freed = ", ".join(answer.models) or "nothing (weights that are pinned or in use stay on the device)"
    return server.done(answer, f"freed: {freed}")


def _placement(server: Server) -> int:
    options = server.options
    changes = bool(options.without_device or options.without_model or options.add)
    if changes and not options.dry_run:
        raise CommandLineError(
            "--without-device, --without-model and --add need --dry-run, because they change nothing"
        )
    if min(options.without_device, default=0) < 0:
        raise CommandLineError("--without-device is a number from 0")
    request = pb.GetPlacementRequest(
        without_devices=options.without_device,
        without_models=options.without_model,
        added=[_added(text) for text in options.add],
    )
    return server.show(
        server.ask("GetPlacement", request), lambda answer: device_pages.placement_page(answer, dry=changes)
    )


def _added(text: str) -> pb.AddedModel:
    try:
        name, size, utilisation = text.rsplit(":", 2)
        added = pb.AddedModel(name=name, bytes=parse_size(size), device_seconds_per_s=float(utilisation))
    except (ValueError, OverflowError):
        raise CommandLineError(f"--add {text}: write NAME:BYTES:UTIL, such as cats:2GB:0.3") from None
    if not name or not 0 <= added.device_seconds_per_s <= 1e6:
        raise CommandLineError(
            f"--add {text}: NAME is empty, or UTIL is not a number of device seconds per second, at least 0"
        )
    return added


def _compact(server: Server) -> int:
    return server.done(
        server.ask("Compact", pb.CompactRequest()),
        "the weights that are not pinned are evicted and loaded again",
    )


def _policy(server: Server) -> int:
    options = server.options
    policy = pb.Policy(
        weight=options.weight, max_delay_us=options.max_delay_us, max_queue_depth=options.max_queue_depth
    )
    if not policy.ListFields():
        raise CommandLineError("give at least one of --weight, --max-delay-us, --max-queue-depth")
    answer = server.ask("SetPolicy", pb.SetPolicyRequest(model=options.model, policy=policy))
    changes = ", ".join(f"{field.name} {value:g}" for field, value in policy.ListFields())
    return server.done(answer, f"{options.model}: {changes}")


def _scheduler(server: Server) -> int:
    changes = pb.Scheduler()
    for key, value in map(key_and_value, server.options.changes):
        # The depth may be null in rsrv.yaml. In the message, 0 stands for null.
        set_field(changes, key, "0" if (key, value) == ("depth", "null") else value)
    answer = server.ask("SetScheduler", pb.SetSchedulerRequest(scheduler=changes))
    return server.show(answer, pages.scheduler_page)


def _alias(server: Server) -> int:
    name, targets = server.options.name, server.options.targets
    if not name and not server.options.remove:
        return server.show(server.ask("SetAlias", pb.SetAliasRequest()), pages.alias_page)
    if not name or bool(targets) == server.options.remove:
        raise CommandLineError("give an alias with the models that answer its requests, or with --remove")
    alias = pb.Alias(name=name, targets=map(_alias_target, targets))
    answer = server.wait("SetAlias", pb.SetAliasRequest(alias=alias), f"{name}: loading")
    shown = [pages.alias_line(alias) for alias in answer.aliases if alias.name == name]
    return server.done(answer, shown[0] if shown else f"{name}: removed")


def _alias_target(text: str) -> pb.AliasTarget:
    """Return the target in MODEL, MODEL=WEIGHT or MODEL=shadow. Raises CommandLineError."""
    model, _, weight = text.partition("=")
    if weight == "shadow":
        return pb.AliasTarget(model=model, shadow=True)
    try:
        return pb.AliasTarget(model=model, weight=float(weight or 1))
    except ValueError:
        raise CommandLineError(f"{text!r} is not MODEL, MODEL=WEIGHT or MODEL=shadow") from None


def _pause(server: Server) -> int:
    options = server.options
    request = pb.PauseRequest(target=_target(options), mode=member(pb.Pause, options.mode))
    return server.done(server.ask("Pause", request), f"{_target_name(options)}: paused ({options.mode})")


def _continue(server: Server) -> int:
    answer = server.ask("Continue", pb.ContinueRequest(target=_target(server.options)))
    return server.done(answer, f"{_target_name(server.options)}: not paused")


def _abort(server: Server) -> int:
    answer = server.ask("Abort", pb.AbortRequest(request_id=server.options.id))
    return server.done(answer, f"{answer.aborted} aborted, {answer.executing} already executing")


def _reload(server: Server) -> int:
    model = server.options.model
    request = pb.ReloadWeightsRequest(model=model)
    answer = server.wait("ReloadWeights", request, f"{model}: compiling and loading")
    return server.done(answer, f"{model}: the current version of the bundle is served")


def _restart(server: Server) -> int:
    options = server.options
    request = pb.RestartRequest(devices=_devices(server), drain_s=options.drain, force=options.force)
    answer = server.wait("Restart", request, "restarting")
    gaps = [
        f"device {device.number}: the first model was back after {device.first_s:.2f} s, all after {device.all_s:.2f} s"
        for device in answer.devices
    ]
    return server.done(answer, "\n".join(gaps))


def _sleep(server: Server) -> int:
    options = server.options
    request = pb.SleepRequest(devices=_devices(server), drain_s=options.drain, force=options.force)
    answer = server.wait("Sleep", request, "going to sleep")
    return server.done(answer, "\n".join(f"device {number}: asleep" for number in answer.devices))


def _wake(server: Server) -> int:
    answer = server.wait("Wake", pb.WakeRequest(devices=_devices(server)), "waking")
    lines = [
        f"device {device.number}: awake " + (f"after {device.seconds:.2f} s" if device.seconds else "already")
        for device in answer.devices
    ]
    return server.done(answer, "\n".join(lines))


def _profile(server: Server) -> int:
    action, seconds = server.options.action, server.options.seconds
    if (action is None) == (seconds is None):
        raise CommandLineError("give start or stop, or --seconds")
    if action == "start":
        answer = server.ask("StartProfile", pb.StartProfileRequest(), LONG_TIMEOUT_S)
        return server.done(answer, f"recording into {answer.directory}")
    if seconds is not None:
        server.ask("StartProfile", pb.StartProfileRequest(), LONG_TIMEOUT_S)
        with suppress(KeyboardInterrupt), steps("recording"):  # Ctrl-C ends the recording early.
            time.sleep(seconds)
    answer = server.wait("StopProfile", pb.StopProfileRequest(), "writing the profile")
    return server.done(answer, answer.directory)


_COMMANDS: dict[str, Callable[[Server], int]] = {
    "status": _status,
    "doctor": _doctor,
    "health": _health,
    "memory": _memory,
    "load": _load,
    "history": history.run_history,
    "why": history.run_why,
    "timeline": _timeline,
    "record": run_record,
    "top": _top,
    "watch": _watch,
    "pin": lambda server: _set_residency(server, "device", server.options.wait),
    "unpin": lambda server: _set_residency(server, "system"),
    "residency": lambda server: _set_residency(server, server.options.residency),
    "prefetch": _prefetch,
    "evict": _evict,
    "placement": _placement,
    "compact": _compact,
    "policy": _policy,
    "alias": _alias,
    "scheduler": _scheduler,
    "pause": _pause,
    "continue": _continue,
    "abort": _abort,
    "reload": _reload,
    "restart": _restart,
    "sleep": _sleep,
    "wake": _wake,
    "profile": _profile,
}
