"""The scheduler's decisions as text, with one line for each instruction except answers."""

from collections.abc import Iterator
from heapq import merge

from rsrv.scheduler.events import (
    AbandonLoad,
    Admit,
    EvictWeights,
    Execute,
    Finish,
    GiveUp,
    Instruction,
    LoadWeights,
    Outcome,
    ReadWeights,
    WarmUp,
    WoundDown,
)
from rsrv.sim.record import FleetRecord, Record

_VERBS = {
    Outcome.SHED: "SHED",
    Outcome.EXPIRED: "EXPIRE",
    Outcome.REFUSED: "REFUSE",
    Outcome.FAILED: "FAIL",
    Outcome.CANCELLED: "CANCEL",
}


def decision_lines(record: Record) -> Iterator[str]:
    """Return the lines `t=<seconds> <INSTRUCTION> <model> ...`, in the order of the instructions."""
    for t, instruction in record.decisions:
        yield f"t={t:.6f} {_line(instruction, record)}"


def fleet_decision_lines(record: FleetRecord) -> Iterator[str]:
    """Return the lines `t=<seconds> <device> <INSTRUCTION> <model> ...` of all devices, and the gateway's commands."""
    instructions = [
        ((t, f"{name} {_line(instruction, device_record)}") for t, instruction in device_record.decisions)
        for name, device_record in record.devices.items()
    ]
    requested = ((t, f"{step.worker} ASKED TO {step.act.name} {step.model}") for t, step in record.steps)
    # At equal times, the gateway's commands come first, and then the devices in their order.
    for t, line in merge(requested, *instructions, key=lambda line: line[0]):
        yield f"t={t:.6f} {line}"


def _line(instruction: Instruction, record: Record) -> str:
    match instruction:
        case Execute(model=model, size=size, rows=rows, variant=variant, requests=requests):
            return f"EXECUTE {model} size={size} rows={rows} variant={variant} requests={len(requests)}"
        case ReadWeights(model=model, epoch=epoch):
            return f"READ {model} epoch={epoch}"
        case LoadWeights(model=model, epoch=epoch):
            return f"LOAD {model} epoch={epoch}"
        case AbandonLoad(model=model, epoch=epoch):
            return f"ABANDON {model} epoch={epoch}"
        case EvictWeights(model=model):
            return f"EVICT {model}"
        case WarmUp(model=model):
            return f"WARM UP {model}"
        case GiveUp(model=model):
            return f"GIVE UP {model}"
        case Admit(run=run):
            return f"ADMIT run={run}"
        case WoundDown(runs=runs, executions=executions, steps=steps):
            return f"WOUND DOWN runs={runs} executions={executions} steps={steps}"
        case Finish(request=request, outcome=outcome, reason=reason):
            model = record.requests[request - 1].request.model
            why = "" if reason is None else f" reason={reason.value}"
            return f"{_VERBS[outcome]} {model} request={request}{why}"
