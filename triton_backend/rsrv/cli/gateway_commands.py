"""The subcommands of `rsrv gateway`."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from rsrv.cli.changes import key_and_value, set_field, shown
from rsrv.cli.client import CommandLineError, Server, carry_out
from rsrv.cli.output import print_section, print_table
from rsrv.control.grpc_service import word
from rsrv.text import amount, duration, percent, rate
from rsrv_gateway.directory import address
from rsrv_gateway.v1 import gateway_pb2 as pb
from rsrv_gateway.v1 import gateway_pb2_grpc

#: Seconds that packing may take.
_PACKING_TIMEOUT_S = 60.0


def run(options: argparse.Namespace) -> int:
    """Carry out a command of `rsrv gateway`, and return its exit status."""
    return carry_out(options, _COMMANDS[options.gateway_command], pb, gateway_pb2_grpc.GatewayStub, address)


def _status(server: Server) -> int:
    request = pb.GetStatusRequest(model=server.options.model)
    return server.show(server.ask("GetStatus", request), status_page)


def _policy(server: Server) -> int:
    policy, paths = pb.Policy(), []
    for key, value in map(key_and_value, server.options.changes):
        paths.append(key)
        if value != "default":
            _set(policy, key, value)
    if not paths:
        return server.show(
            server.ask("GetStatus", pb.GetStatusRequest()), lambda answer: _policy_page(answer.policy)
        )
    request = pb.SetPolicyRequest(policy=policy)
    request.update_mask.paths.extend(paths)
    answer = server.ask("SetPolicy", request)

    def page(answer: pb.SetPolicyResponse) -> None:
        _policy_page(answer.policy)
        _warnings(answer.warnings)

    return server.show(answer, page)


def _place(server: Server) -> int:
    options = server.options
    request = pb.SetPlacementRequest(
        model=options.model, fill_factor=options.fill_factor, allow_unknown=options.unknown
    )
    if options.replicas is not None:
        _set(request, "replicas", options.replicas)
    if options.fill is not None:
        _set(request, "fill", options.fill)
    answer = server.ask("SetPlacement", request)
    return server.show(answer, lambda answer: _warnings(answer.warnings, f"{options.model}: placement set"))


def _repack(server: Server) -> int:
    wait = not server.options.no_wait
    answer = server.wait("Repack", pb.RepackRequest(wait=wait), "packing models", _PACKING_TIMEOUT_S)
    done = f"{answer.repacks.packed} packed, {answer.repacks.moved} move, {answer.repacks.held} stay"
    return server.done(answer, done if wait else "repack requested")


def _locate(server: Server) -> int:
    answer = server.ask("Locate", pb.LocateRequest(model=server.options.model))

    def page(answer: pb.LocateResponse) -> None:
        print_table(
            answer.workers,
            {
                "WORKER": lambda route: route.worker,
                "GRPC": lambda route: route.grpc,
                "HTTP": lambda route: route.http or "-",
                "PLACED": lambda route: "yes" if route.placed else "no",
            },
        )

    return server.show(answer, page)


def _health(server: Server) -> int:
    def reason(status: pb.GetStatusResponse) -> str:
        workers = status.workers
        if not workers:
            return "no server is known to the gateway: set gateway.workers"
        if dead := [worker.name for worker in workers if not worker.alive]:
            return f"these servers do not answer: {', '.join(dead)}"
        return (
            f"none of the gateway's {len(workers)} servers serves the model"
            if server.options.model
            else "no server is ready"
        )

    return server.health(reason)


_COMMANDS: Mapping[str, Callable[[Server], int]] = {
    "status": _status,
    "policy": _policy,
    "place": _place,
    "repack": _repack,
    "locate": _locate,
    "health": _health,
}


def status_page(answer: pb.GetStatusResponse) -> None:
    """Print the gateway's workers, then its models."""
    print(f"gateway {answer.pid}, {word(pb.Mode, answer.mode)}")
    if answer.mode == pb.MODE_LPT_PACKING:
        repacks = answer.repacks
        last = f"the last ({repacks.last}) {duration(repacks.last_age_s)} ago" if repacks.last else "none yet"
        print(
            f"repacks: {last}; the next after {duration(repacks.threshold_device_s)} of device time, of which "
            f"{duration(repacks.device_s)} have passed"
        )
    print_section(
        answer.workers,
        {
            "WORKER": lambda worker: worker.name,
            "STATE": lambda worker: "alive" if worker.alive else "dead",
            "GRPC": lambda worker: worker.grpc,
            "MODELS": lambda worker: str(worker.models),
            "UTILISATION": lambda worker: percent(worker.utilisation),
            "BUSY": lambda worker: percent(worker.busy),
            "WEIGHTS": lambda worker: amount(worker.bytes) + (" (too much)" if worker.oversubscribed else ""),
            "BUDGET": lambda worker: amount(worker.budget_bytes) if worker.HasField("budget_bytes") else "-",
            "BACKLOG": lambda worker: duration(worker.backlog_s),
            "OUTSTANDING": lambda worker: str(worker.outstanding),
        },
    )
    print_section(
        answer.models,
        {
            "MODEL": lambda model: model.name,
            "PLACED": lambda model: " ".join(model.placed) or "-",
            "READY": lambda model: str(len(model.ready)),
            "MOVING TO": lambda model: " ".join(model.moving_to) or "-",
            "REPLICAS": lambda model: f"{model.effective_replicas} of {_count(model.replicas)}",
            "UTILISATION": lambda model: percent(model.utilisation),
            "REQUESTS": lambda model: rate(model.requests_s),
            "PER ITEM": lambda model: duration(model.item_s) if model.HasField("item_s") else "-",
            "SIZE": lambda model: amount(model.bytes),
        },
    )
    _warnings(answer.warnings)


def _policy_page(policy: pb.Policy) -> None:
    for field in pb.Policy.DESCRIPTOR.fields:
        value = getattr(policy, field.name)
        if field.name == "replicas":
            text = _count(value)
        elif field.enum_type is None and not policy.HasField(field.name):
            text = "null"
        else:
            text = shown(field, value)
        print(f"{field.name}  {text}")


def _warnings(warnings: Any, otherwise: str = "") -> None:
    for text in warnings:
        print(f"\n! {text}")
    if not warnings and otherwise:
        print(otherwise)


def _set(message: Any, key: str, value: str) -> None:
    """Set a field to a value that is written as in rsrv.yaml. Raises CommandLineError."""
    if key != "replicas":
        set_field(message, key, value)
        return
    try:
        words = {"all": pb.Replicas(all=True), "auto": pb.Replicas(auto=True)}
        message.replicas.CopyFrom(words[value] if value in words else pb.Replicas(count=int(value)))
    except ValueError:
        raise CommandLineError(f"replicas cannot be {value!r}") from None


def _count(replicas: pb.Replicas) -> str:
    kind = replicas.WhichOneof("replicas")
    return str(replicas.count) if kind == "count" else str(kind)
