"""Parts `latency`, `eviction` and `many`: models in a runtime process, with more weights than fit and with many models."""

import shutil
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.gpu.runtimes import Answers, clients, in_threads, make_models, private_bytes, runtime
from rsrv.text import amount, duration, rate

#: warm requests for each cold one
_WARM = 5
#: share of all weights that fit, and the exponent of Zipf's law for the models' popularity
_FIT, _ZIPF = 0.25, 1.0


def latency(given: PartInput, tell: Tell) -> None:
    """For each size, ask two models in turn of which one fits: cold; then one of them again: warm."""
    for size in given.amounts.latency:
        what = f"weights of {amount(size)}"
        if reason := _no_room(given, size):
            tell(Finding(what, "SKIPPED", reason=reason))
            continue
        answers, cold, warm = Answers(), [], []
        models = make_models(given, size, [f"w{size}a", f"w{size}b"])
        with (
            runtime(
                given, f"latency{size}", given.device.platform, weight_budget_bytes=size * 3 // 2
            ) as process,
            clients(process, models) as (one, other),
        ):
            for _ in range(given.amounts.rounds):
                for client, model in ((one, models[0]), (other, models[1])):
                    before = process.loads()
                    cold.append(answers.ask(client, model))
                    if process.loads() == before:
                        cold.pop()  # the first request finds the weights of the warm-up
                    warm += [answers.ask(client, model) for _ in range(_WARM)]
        for model in models:
            shutil.rmtree(model.path)
        added = median(cold) - median(warm)
        figures = {"cold_s": median(cold), "warm_s": median(warm), "bytes_per_s": size / added}
        value = f"cold {duration(figures['cold_s'])}, warm {duration(figures['warm_s'])}"
        reason = f"medians of {len(cold)} and {len(warm)}; the difference is {amount(size / added)}/s"
        tell(Finding(what, "MEASURED", value, reason, figures))
        tell(_right(f"answers with {amount(size)}", answers))


def eviction(given: PartInput, tell: Tell) -> None:
    """Ask many models, of whose weights a quarter fits, from several threads."""
    amounts = given.amounts
    total = amounts.eviction_models * amounts.eviction_each
    if reason := _no_room(given, total // 2):
        tell(Finding("eviction", "SKIPPED", reason=reason))
        return
    models = make_models(given, amounts.eviction_each, [f"e{i}" for i in range(amounts.eviction_models)])
    popularity = np.arange(1, len(models) + 1) ** -_ZIPF
    answers = Answers()
    with (
        runtime(given, "eviction", given.device.platform, weight_budget_bytes=int(total * _FIT)) as process,
        clients(process, models) as registered,
    ):
        before, started = process.loads(), time.perf_counter()

        def work(number: int) -> None:
            rng = np.random.default_rng(number)
            while time.perf_counter() < started + amounts.eviction_s:
                index = int(rng.choice(len(models), p=popularity / popularity.sum()))
                with registered[index].busy:
                    answers.ask(registered[index], models[index])

        in_threads(amounts.clients, work)
        elapsed, loads = time.perf_counter() - started, process.loads() - before
    tell(_right("answers", answers))
    swaps = loads / elapsed
    p50, p99 = (float(x) for x in np.quantile(answers.seconds, [0.5, 0.99]))
    tell(
        check(
            "swaps",
            loads > 0,
            f"{rate(swaps)}, {amount(swaps * amounts.eviction_each)}/s",
            f"{len(models)} models of {amount(amounts.eviction_each)}, a quarter fits, {amounts.clients} clients",
            {"loads_per_s": swaps, "bytes_per_s": swaps * amounts.eviction_each},
        )
    )
    figures = {"answers_per_s": len(answers.seconds) / elapsed, "p50_s": p50, "p99_s": p99}
    value = f"{rate(figures['answers_per_s'])}, p50 {duration(p50)}, p99 {duration(p99)}"
    tell(Finding("requests", "MEASURED", value, "each waits for its weights where they are absent", figures))


def many(given: PartInput, tell: Tell) -> None:
    """Register many small models in one runtime, and ask each in turn. Triton's stubs come on top: 25 MB of host memory each."""
    amounts = given.amounts
    models = make_models(given, amounts.many_each, [f"m{i}" for i in range(amounts.many)])
    answers = Answers()
    started = time.perf_counter()
    with runtime(given, "many", given.device.platform) as process, clients(process, models[:1]):
        first, one = time.perf_counter() - started, _held(process.status())
        with clients(process, models[1:]) as registered:
            ready, all_of_them = time.perf_counter() - started, _held(process.status())
            for _ in range(amounts.rounds):
                for client, model in zip(registered, models[1:], strict=True):
                    answers.ask(client, model)
    others = len(models) - 1
    each = {key: max(0.0, all_of_them[key] - one[key]) / others for key in one}
    what = f"{len(models)} models of {amount(amounts.many_each)}"
    figures = {"first_s": first, "ready_s": ready, "each_s": (ready - first) / others}
    value = f"the first ready after {duration(first)}, all after {duration(ready)}"
    tell(Finding(f"start of {what}", "MEASURED", value, f"{duration(figures['each_s'])} each", figures))
    value = f"{amount(each['device'])} of the device, {amount(each['host'])} of the host"
    tell(
        Finding(
            "memory of each added model", "MEASURED", value, "of the runtime, without Triton's stubs", each
        )
    )
    p50 = median(answers.seconds)
    tell(Finding("requests", "MEASURED", f"p50 {duration(p50)}", "one at a time, in turn", {"p50_s": p50}))
    tell(_right("answers", answers))


def _right(what: str, answers: Answers) -> Finding:
    value = f"{len(answers.seconds) - answers.wrong} of {len(answers.seconds)} right"
    return check(what, answers.wrong == 0 < len(answers.seconds), value, "exact sums of the weights")


def _held(status: dict[str, Any]) -> dict[str, float]:
    return {"device": status["memory"]["device"]["held_bytes"], "host": private_bytes(status["pid"])}


def _no_room(given: PartInput, size: int) -> str:
    """Return why two models of this size cannot be measured here; empty: they can."""
    device, disk = given.device.memory, shutil.disk_usage(given.folder).free
    if device is not None and size * 3 // 2 > device:
        return f"the device has {amount(device)}, and one and a half of them must fit"
    if 3 * size > disk:
        return f"{given.folder} has {amount(disk)} free: set TMPDIR to a folder with {amount(3 * size)}"
    lines = Path("/proc/meminfo").read_text().splitlines()
    host = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    return f"the host has {amount(host)} available, {amount(4 * size)} are needed" if 4 * size > host else ""
