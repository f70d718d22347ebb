"""Prints the memory, the load and the placement of devices for people."""

from collections.abc import Sequence

from rsrv.cli.output import print_pairs, print_section, print_table, saved
from rsrv.control.grpc_service import word
from rsrv.control.v1 import control_pb2 as pb
from rsrv.text import amount, duration, percent, some


def weights_text(memory: pb.DeviceMemory | pb.HostMemory) -> str:
    """Return the bytes of weights, and how many bytes sharing saves."""
    return amount(memory.physical_bytes) + saved(memory.physical_bytes, memory.logical_bytes)


def memory_page(answer: pb.GetMemoryResponse) -> None:
    """Print the use of each device's memory: the budget, the free memory, the host copies, the models and the shared tensors."""
    for at, device in enumerate(answer.devices):
        print(f"{chr(10) if at else ''}device {device.device}: {device.record.memory.name or 'none yet'}")
        print_pairs([(f"  {name}", text) for name, text in _budget(device)])
        _print_weights(device)


def _print_weights(use: pb.MemoryUse) -> None:
    """Print the models of a device, and the tensors that they share."""
    shared_with = shared_with_each(use)
    print_section(
        sorted((model for model in use.record.models if not model.meta), key=lambda model: model.name),
        {
            "MODEL": lambda model: model.name,
            "SIZE": lambda model: amount(model.device_bytes),
            "OWN": lambda model: amount(use.own_bytes[model.name]),
            "SHARED": lambda model: amount(shared_bytes(use, model)),
            "WITH": lambda model: some(shared_with.get(model.name, [])),
            "STATE": lambda model: amount(model.state_bytes) if model.state_bytes else "-",
            "ON DEVICE": lambda model: word(pb.Weights, model.weights) + (", pinned" if model.pinned else ""),
            "HOST COPY": lambda model: amount(model.host_bytes) if model.host_bytes else "-",
        },
    )
    print_section(
        sorted(use.record.shared, key=lambda group: -group.bytes),
        {
            "SHARED": lambda group: amount(group.bytes),
            "MODELS": lambda group: str(len(group.models)),
            "NAMES": lambda group: some(list(group.models)),
            "ON DEVICE": lambda group: "yes" if group.on_device else "no",
        },
    )


def _budget(use: pb.MemoryUse) -> list[tuple[str, str]]:
    """Return the lines about the use of the device's memory, and of the host's."""
    record, memory = use.record, use.record.memory
    pairs = []
    if memory.HasField("limit_bytes"):
        pairs += [
            ("allocator", f"{amount(memory.limit_bytes)} (runtime.memory_fraction of the device)"),
            ("kept free", f"{amount(memory.limit_bytes // 10)}, a tenth"),
        ]
    if record.scratch_bytes:
        pairs.append(("executions", amount(record.scratch_bytes)))
    if memory.HasField("budget_bytes"):
        configured = use.HasField("weight_budget_bytes") and use.weight_budget_bytes == memory.budget_bytes
        usual = (
            "the allocator's memory, less a tenth and executions"
            if memory.HasField("limit_bytes")
            else "the default on a CPU"
        )
        why = "runtime.weight_budget_bytes" if configured else usual
        pairs.append(("budget", f"{amount(memory.budget_bytes)} for weights: {why}"))
    weights = weights_text(memory)
    pairs.append(("weights", f"{weights}, {amount(memory.pinned_bytes)} pinned"))
    if memory.HasField("budget_bytes"):
        pairs.append(("free", f"{amount(max(0, memory.budget_bytes - memory.physical_bytes))} for weights"))
    if record.kept_bytes:
        pairs.append(("kept", f"{amount(record.kept_bytes)} for runs of meta models"))
    if record.HasField("largest_free_bytes") and memory.limit_bytes > record.in_use_bytes:
        free = memory.limit_bytes - record.in_use_bytes
        scattered = percent(max(0.0, 1 - record.largest_free_bytes / free))
        pairs.append(
            (
                "fragmentation",
                f"{scattered}: of {amount(free)} that are free, the largest piece has {amount(record.largest_free_bytes)}",
            )
        )
    limit = f" of {amount(record.host_limit_bytes)}" if record.HasField("host_limit_bytes") else ""
    return [*pairs, ("host", f"{weights_text(record.host)}{limit}")]


def shared_bytes(use: pb.MemoryUse, model: pb.ModelRecord) -> int:
    """Return the bytes of a model's weights that other models share on a device."""
    own: int = use.own_bytes[model.name]
    return model.device_bytes - model.state_bytes - own


def shared_with_each(use: pb.MemoryUse) -> dict[str, list[str]]:
    """Return, for each model that shares tensors, the other models that have some of its tensors."""
    sharers: dict[str, dict[str, None]] = {}
    for group in use.record.shared:
        for name in group.models:
            sharers.setdefault(name, {}).update(dict.fromkeys(group.models))
    return {name: [model for model in models if model != name] for name, models in sharers.items()}


def load_page(answer: pb.GetLoadResponse) -> None:
    for device in answer.devices:
        if len(answer.devices) > 1:
            print(f"{'' if device is answer.devices[0] else chr(10)}device {device.number}: ", end="")
        _print_load(device)


def _print_load(device: pb.DeviceLoad) -> None:
    if not device.instance:
        print("the runtime does not answer")
        return
    line = f"work for {duration(device.backlog_s)}"
    if device.HasField("budget_bytes"):
        line += f"; {amount(device.free_bytes)} of {amount(device.budget_bytes)} for weights are free"
    print(line)
    print_table(
        sorted(device.models, key=lambda model: model.name),
        {
            "MODEL": lambda model: model.name,
            "QUEUED": lambda model: str(model.queued),
            "RUNNING": lambda model: str(model.executing),
            "SEQUENCES": lambda model: str(model.sequences),
            "WEIGHTS": lambda model: word(pb.Weights, model.weights),
            "SIZE": lambda model: amount(model.device_bytes),
            "COST PER ROW": lambda model: duration(model.cost_s) if model.HasField("cost_s") else "-",
            "MISSES": lambda model: str(model.misses),
            "DEVICE TIME": lambda model: duration(model.device_seconds),
            "ROWS": lambda model: str(model.useful_rows),
        },
    )


def placement_page(answer: pb.GetPlacementResponse, *, dry: bool) -> None:
    """Print the devices, the models with the reasons for their places, and the next moves. `dry` is True for a dry run."""
    state = (
        "dry run: nothing is changed"
        if dry
        else f"table {answer.generation}"
        if answer.generation
        else "no table"
    )
    print(f"placement {answer.mode}, {state}")
    print_section(
        answer.devices,
        {
            "DEVICE": lambda device: str(device.device),
            "STATE": lambda device: "alive" if device.alive else "dead",
            "MODELS": lambda device: str(device.models),
            "UTILISATION": lambda device: percent(device.utilisation),
            "BUSY": lambda device: percent(device.busy),
            "WEIGHTS": lambda device: amount(device.bytes),
            "BUDGET": lambda device: amount(device.budget_bytes) if device.HasField("budget_bytes") else "-",
        },
    )
    print_section(
        answer.models,
        {
            "MODEL": lambda model: model.name,
            "DEVICES": lambda model: _numbers(model.devices) or "any",
            "MOVING TO": lambda model: _numbers(model.moving_to) or "-",
            "UTILISATION": lambda model: percent(model.utilisation),
            "SIZE": lambda model: amount(model.bytes),
            "REASON": lambda model: model.reason or "-",
        },
    )
    if answer.moves:
        print("\nmoves:" if dry else "\nthe next packing would move:")
        print_table(
            answer.moves,
            {
                "MODEL": lambda move: move.model,
                "FROM": lambda move: _numbers(move.before) or "-",
                "TO": lambda move: _numbers(move.after) or "-",
            },
        )
    for text in answer.warnings:
        print(f"\n! {text}")


def _numbers(devices: Sequence[int]) -> str:
    return " ".join(map(str, devices))
