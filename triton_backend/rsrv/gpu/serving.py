"""Parts `eviction`, `outputs`, `latency` and `many`: requests over the socket of a runtime process, without Triton."""

import shutil
import time
from contextlib import closing
from pathlib import Path
from statistics import median

import numpy as np

from rsrv.control.v1 import control_pb2 as pb
from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.gpu.runtimes import (
    Answers,
    ModelClient,
    clients,
    in_threads,
    make_models,
    private_bytes,
    runtime,
)
from rsrv.text import amount, duration, rate
from rsrv_bundle.export import export_bundle

#: Number of warm requests for each cold request.
_WARM = 5
#: Share of all models' weights that fits on the device.
_FIT = 0.25
#: Exponent of Zipf's law for the models' popularity.
_ZIPF = 1.0
#: Share of the part's time for the measurement. Writing and registering the models need the rest of the time.
_MEASURING = 0.5
#: Minimum number of requests for each size of an output.
_LEAST = 5


def latency(part_input: PartInput, tell: Tell) -> None:
    """For each size of weights, measure cold and warm requests.

    Only one of two models fits on the device. Cold requests go to the two models in turn. After each cold request, warm requests
    go to the same model.
    """
    for size in part_input.amounts.latency:
        title = f"weights of {amount(size)}"
        if reason := _no_room(part_input, device=size * 3 // 2, files=2 * size):
            tell(Finding(title, "NOT RUN", reason=reason))
            continue
        answers, cold, warm = Answers(), [], []
        models = make_models(part_input, size, [f"w{size}a", f"w{size}b"])
        with (
            runtime(
                part_input, f"latency{size}", part_input.device.platform, weight_budget_bytes=size * 3 // 2
            ) as process,
            clients(process, models) as (first_client, second_client),
        ):
            for _ in range(part_input.amounts.rounds):
                for client, model in ((first_client, models[0]), (second_client, models[1])):
                    before = process.loads()
                    cold.append(answers.ask(client, model))
                    if process.loads() == before:
                        cold.pop()  # The first request finds the weights that the warm-up loaded.
                    warm += [answers.ask(client, model) for _ in range(_WARM)]
        for model in models:
            shutil.rmtree(model.path)
        added = median(cold) - median(warm)
        figures = {"cold_s": median(cold), "warm_s": median(warm), "bytes_per_s": size / added}
        value = f"cold {duration(figures['cold_s'])}, warm {duration(figures['warm_s'])}"
        reason = f"medians of {len(cold)} and {len(warm)}; the difference is {amount(size / added)}/s"
        tell(Finding(title, "MEASURED", value, reason, figures))
        tell(_right(f"answers with {amount(size)}", answers))


def eviction(part_input: PartInput, tell: Tell) -> None:
    """Send requests from several threads to many models. A quarter of their weights fits on the device."""
    amounts = part_input.amounts
    total = amounts.eviction_models * amounts.eviction_each
    if reason := _no_room(part_input, device=int(total * _FIT), files=total):
        tell(Finding("requests", "NOT RUN", reason=reason))
        return
    models = make_models(part_input, amounts.eviction_each, [f"e{i}" for i in range(amounts.eviction_models)])
    popularity = np.arange(1, len(models) + 1) ** -_ZIPF
    answers = Answers()
    with (
        runtime(
            part_input, "eviction", part_input.device.platform, weight_budget_bytes=int(total * _FIT)
        ) as process,
        clients(process, models) as registered,
    ):
        seconds = part_input.window(amounts.eviction_s, _MEASURING)
        before, started = process.loads(), time.perf_counter()

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            while time.perf_counter() < started + seconds:
                index = int(rng.choice(len(models), p=popularity / popularity.sum()))
                with registered[index].busy:
                    answers.ask(registered[index], models[index])

        in_threads(amounts.clients, work)
        elapsed, loads = time.perf_counter() - started, process.loads() - before
    p50, p99 = (float(x) for x in np.quantile(answers.seconds, [0.5, 0.99]))
    figures = {"answers_per_s": len(answers.seconds) / elapsed, "p50_s": p50, "p99_s": p99}
    value = f"{rate(figures['answers_per_s'])}, p50 {duration(p50)}, p99 {duration(p99)}"
    title = f"{len(models)} models of {amount(amounts.eviction_each)}"
    reason = f"room for a quarter of them, {amounts.clients} clients, Zipf's law with exponent {_ZIPF:g}"
    tell(Finding("requests", "MEASURED", value, f"{title}, {reason}", figures))
    swaps = loads / elapsed
    value = f"{rate(swaps)}, {amount(swaps * amounts.eviction_each)}/s"
    figures = {"loads_per_s": swaps, "bytes_per_s": swaps * amounts.eviction_each}
    tell(check("loads of weights", loads > 0, value, "at least one", figures))
    tell(_right("answers", answers))


def outputs(part_input: PartInput, tell: Tell) -> None:
    """Send requests to models with small and large outputs, one request at a time."""
    for nbytes in part_input.amounts.outputs:
        path, addend = part_input.folder / f"o{nbytes}", np.arange(nbytes // 4, dtype=np.float32)[None]
        export_bundle(
            lambda params, x: {"y": x + params["w"]},
            {"w": addend},
            {"x": np.zeros((1, 1), np.float32)},
            batch_sizes=[1],
            out_dir=path,
        )
        with (
            runtime(part_input, path.name, part_input.device.platform) as process,
            closing(ModelClient(process.launcher.open, path.name, path)) as client,
        ):
            took: list[float] = []
            right = 0
            seconds = part_input.window(
                part_input.amounts.output_s, _MEASURING / len(part_input.amounts.outputs)
            )
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(took) < _LEAST:
                x = np.full((1, 1), len(took), np.float32)
                (y,) = client.ask([x])
                took.append(client.answered_s)
                right += np.array_equal(y, x + addend)
        p50 = median(took)
        figures = {"p50_s": p50, "bytes_per_s": nbytes / p50}
        value = f"{amount(figures['bytes_per_s'])}/s, p50 {duration(p50)}, {right} of {len(took)} right"
        reason = "whole requests of one client, whose input is one number; the answer lies in shared memory"
        tell(check(f"an output of {amount(nbytes)}", right == len(took), value, reason, figures))


def many(part_input: PartInput, tell: Tell) -> None:
    """Register many small models in one runtime, and send requests to them in turn.

    Triton's stubs are not measured. Each stub takes another 25 MB of host memory.
    """
    amounts = part_input.amounts
    models = make_models(part_input, amounts.many_each, [f"m{i}" for i in range(amounts.many)])
    answers = Answers()
    started = time.perf_counter()
    with runtime(part_input, "many", part_input.device.platform) as process, clients(process, models[:1]):
        first, alone = time.perf_counter() - started, _held(process.record())
        with clients(process, models[1:]) as registered:
            ready, all_of_them = time.perf_counter() - started, _held(process.record())
            for _ in range(amounts.rounds):
                for client, model in zip(registered, models[1:], strict=True):
                    answers.ask(client, model)
    others = len(models) - 1
    each = {key: max(0.0, all_of_them[key] - alone[key]) / others for key in alone}
    title = f"{len(models)} models of {amount(amounts.many_each)}"
    figures = {"first_s": first, "ready_s": ready, "each_s": (ready - first) / others}
    value = f"the first ready after {duration(first)}, all after {duration(ready)}"
    tell(Finding(f"start of {title}", "MEASURED", value, f"{duration(figures['each_s'])} each", figures))
    value = f"{amount(each['device'])} of the device, {amount(each['host'])} of the host"
    tell(
        Finding(
            "memory of each added model", "MEASURED", value, "of the runtime, without Triton's stubs", each
        )
    )
    p50 = median(answers.seconds)
    tell(Finding("requests", "MEASURED", f"p50 {duration(p50)}", "one at a time, in turn", {"p50_s": p50}))
    tell(_right("answers", answers))


def _right(title: str, answers: Answers) -> Finding:
    value = f"{len(answers.seconds) - answers.wrong} of {len(answers.seconds)} right"
    return check(title, answers.wrong == 0 < len(answers.seconds), value, "exact sums of the weights")


def _held(record: pb.DeviceRecord) -> dict[str, float]:
    return {"device": record.memory.held_bytes, "host": private_bytes(record.pid)}


def _no_room(part_input: PartInput, device: int, files: int) -> str:
    """Return why this many bytes of weights do not fit on the device and in files, or an empty text if they fit.

    The host also holds a copy of the files' weights.
    """
    memory, disk = part_input.device.memory, shutil.disk_usage(part_input.folder).free
    if memory is not None and device > memory:
        return f"the device has {amount(memory)}, and {amount(device)} must fit"
    if 1.1 * files > disk:
        return (
            f"{part_input.folder} has {amount(disk)} free: set TMPDIR to a folder with {amount(1.1 * files)}"
        )
    lines = Path("/proc/meminfo").read_text().splitlines()
    host = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    if 1.5 * files > host:
        return f"the host has {amount(host)} available, {amount(1.5 * files)} are needed"
    return ""
