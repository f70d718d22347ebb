"""The entry of Triton's Python backend for an alias: another name by which clients use one model or several models.

The stub of an alias attaches to the runtime as the stubs of its targets do, so a request is as fast as under the
model's own name. The shares in config.pbtxt decide which target answers. When the shares change, the control process
writes the alias again. As after any other change, Triton loads the new version while the old one serves, so no request
is lost.
"""

import asyncio  # noqa: F401  Triton's stub imports it lazily, as in `model`
import json
import logging
import math
import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from rsrv.hooks.loader import HookError
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.model import ModelStub, Setup, import_hooks, serve_model
from rsrv.stub.replica import StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.request import parse_parameters
from rsrv.stub.session import UNREACHABLE
from rsrv.stub.shadow import Shadow
from rsrv.stub.tensors import BrokenPairing, Tensors
from rsrv.wire.frames import Status

log = logging.getLogger(__name__)

#: Parameter of requests. Requests with the same value get the same target while the shares do not change.
STICKY = "rsrv_sticky"
#: A target with this value instead of a weight gets copies of all requests.
SHADOW = "shadow"
#: First and longest pause, in seconds, before the next attempt to load failed targets. Each pause is twice the previous one.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0
#: Key in config.pbtxt with the shares by target, as a JSON object.
_PARAMETER = "rsrv_alias"


class TargetResponses(Responses):
    """Responses whose errors name the alias and the target. All targets of a process share one list of owed replies."""

    def __init__(self, pb_utils: Any, where: str, together: Responses) -> None:
        super().__init__(pb_utils)
        self._where = where
        self._owed = together._owed

    def failure(self, status: Status, text: str, *, sub_call: bool = False) -> Any:
        return super().failure(status, f"{self._where}: {text}", sub_call=sub_call)


class Split:
    """Chooses the target of each request: by chance, or by a hash of the request's parameter STICKY."""

    def __init__(
        self, alias: str, weights: Mapping[str, float | str], draw: Callable[[], float] = random.random
    ) -> None:
        """`draw` returns a number from 0 below 1."""
        #: Part of the hash, so that aliases divide the same sticky values differently.
        self._alias = alias
        self._shares = {
            name: float(weight) for name, weight in weights.items() if weight and weight != SHADOW
        }
        #: Targets that get requests.
        self.names = list(self._shares)
        #: Sums of the weights up to each target, for the draw.
        self._ends = list(accumulate(self._shares.values()))
        self._draw = draw

    def among(self, names: Collection[str]) -> "Split":
        """Return a Split over the targets `names` only. It divides the other targets' requests among `names` by weight."""
        shares = {name: weight for name, weight in self._shares.items() if name in names}
        return Split(self._alias, shares, self._draw)

    def choose(self, request: Any) -> str:
        """Return the target of one of Triton's requests; never raises.

        A sticky value goes to the target with the smallest `_distance` (weighted rendezvous hashing). So if one weight changes,
        sticky requests move only to its target or away from it.
        """
        if len(self.names) == 1:
            return self.names[0]
        try:
            text = request.parameters()
            value = parse_parameters(text).get(STICKY) if len(text) > 2 else None
        except Exception:  # noqa: BLE001 - the target refuses the request
            return self.names[0]
        if value is None:
            point = self._draw() * self._ends[-1]
            return self.names[min(bisect_right(self._ends, point), len(self.names) - 1)]
        return min(self.names, key=lambda name: self._distance(name, value))

    def _distance(self, name: str, value: object) -> float:
        """Return an exponentially distributed number for a target and a sticky value. Its rate is the target's weight."""
        text = f"{self._alias}\0{name}\0{value}".encode("utf-8", "surrogatepass")
        digest = blake2b(text, digest_size=8).digest()
        return -math.log((int.from_bytes(digest) + 1) / 2**64) / self._shares[name]


class Alias:
    """Answers Triton's requests for one alias through its targets.

    A target that is not loaded gets no requests. The other targets answer its share in addition to their own.
    """

    def __init__(
        self, split: Split, load: Callable[[str], tuple[Replicas, Shadow | None]], responses: Responses
    ) -> None:
        """`load` returns a target and, for a shadow target, the object that copies requests for it. It may raise any error."""
        self._responses = responses
        self._split = split
        self._load = load
        self._closed = False
        self._targets: dict[str, Replicas] = {}
        self._shadows: tuple[Shadow, ...] = ()
        #: Chooses a loaded target for requests whose own target is not loaded.
        self._instead = split

    def load(self, names: Iterable[str]) -> dict[str, str]:
        """Load targets. Return the reason for each target that does not load. Never raises."""
        failures = {}
        for name in names:
            try:
                target, shadow = self._load(name)
            except (*UNREACHABLE, BrokenPairing, HookError) as error:
                failures[name] = str(error)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's model.py
                failures[name] = f"{type(error).__name__}: {error}"
            else:
                self._add(name, target, shadow)
        return failures

    def _add(self, name: str, target: Replicas, shadow: Shadow | None) -> None:
        self._targets[name] = target
        self._instead = self._split.among(self._targets)
        self._shadows += (shadow,) if shadow is not None else ()
        if self._closed:
            self._close_targets()

    def _close_targets(self) -> None:
        """Close the targets. Two threads may call this at a time, so each closes only the targets that it has removed."""
        for name in list(self._targets):
            if (target := self._targets.pop(name, None)) is not None:
                target.close()

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer Triton's requests, as `EntryPoint.execute`."""
        shadows = self._shadows
        return self._execute_watched(requests, shadows) if shadows else self._execute(requests)

    def _execute_watched(self, requests: Sequence[Any], shadows: Sequence[Shadow]) -> list[Any] | None:
        """Answer requests. Then send copies of them to the shadow targets."""
        watched, comparisons = list(requests), []
        for shadow in shadows:
            for index, request in enumerate(watched):
                if (comparison := shadow.begin(request)) is not None:
                    watched[index] = comparison.watched
                    comparisons.append((index, shadow, comparison))
        responses = self._execute(watched)
        if responses is not None:
            for index, _, comparison in comparisons:
                comparison.answered(responses[index], copy=False)
        for shadow in shadows:
            if copies := [comparison.copy for _, compared, comparison in comparisons if compared is shadow]:
                shadow.execute(copies)
        return responses

    def _execute(self, requests: Sequence[Any]) -> list[Any] | None:
        chosen, parts = [self._choose(request) for request in requests], dict[str, list[Any]]()
        for name, request in zip(chosen, requests, strict=True):
            parts.setdefault(name, []).append(request)
        if len(parts) == 1:
            return self._targets[chosen[0]].execute(requests)
        # Each target returns its answers here if it can, because requests that are answered later get no answer if this process
        # dies.
        answers = {name: self._targets[name].execute(part) for name, part in parts.items()}
        whole = {name: iter(responses) for name, responses in answers.items() if responses is not None}
        if len(whole) == len(parts):
            return [next(whole[name]) for name in chosen]
        # execute() must return all answers or none, so send the answers that are ready.
        for name, request in zip(chosen, requests, strict=True):
            if name in whole:
                self._responses.send(request, next(whole[name]))
        return None

    def _choose(self, request: Any) -> str:
        name = self._split.choose(request)
        return name if name in self._targets else self._instead.choose(request)

    def close(self) -> None:
        self._closed = True
        for shadow in self._shadows:
            shadow.close()
        self._close_targets()


class AliasStub(ModelStub):
    """The stub of one alias."""

    def serve(self, setup: Setup, pb_utils: Any) -> Alias:
        """Try to load all targets. Raises TritonModelException with the reasons if no target can answer requests."""
        alias, folder = setup.name, setup.bundle.parent / "calls"
        shares: dict[str, Any] = json.loads(setup.config["parameters"][_PARAMETER]["string_value"])
        dtypes = {wire.name: wire.dtype for wire in setup.outputs}
        tensors, guard, together = Tensors(pb_utils), HookGuard(), Responses(pb_utils)
        # An import that hangs cannot be ended, so each further attempt waits for the same import.
        imports = {target: import_hooks(folder / target) for target in shares}

        def load(target: str) -> tuple[Replicas, Shadow | None]:
            copies = shares[target] == SHADOW
            where = f"alias {alias!r}, model {target!r}"
            own = replace(setup, name=target, bundle=folder / target, alias=alias, copies=copies)
            process = StubProcess(tensors, TargetResponses(pb_utils, where, together), guard)
            model = serve_model(own, process, pb_utils, imports[target])
            shadow = Shadow(where, tensors, dtypes, model.execute_later, model.compared) if copies else None
            return model, shadow

        split = Split(alias, shares)
        served = Alias(split, load, together)
        self._closed = threading.Event()
        failures = served.load(shares)
        if failures.keys() >= set(split.names):
            served.close()
            reasons = "; ".join(f"model {name!r}: {text}" for name, text in failures.items())
            raise pb_utils.TritonModelException(f"alias {alias!r}: {reasons}")
        if failures:
            again = partial(self._load_again, served, failures)
            threading.Thread(target=again, name="targets", daemon=True).start()
        return served

    def _load_again(self, served: Alias, failures: Mapping[str, str]) -> None:
        """Retry the targets that failed to load, until all are loaded or the alias is unloaded."""
        pause, logged = _FIRST_PAUSE_S, dict[str, str]()
        while failures:
            for name, text in failures.items():
                if logged.get(name) != text:
                    log.error(
                        "model %r of this alias cannot be loaded; the other models answer its requests: %s",
                        name,
                        text,
                    )
            logged = {**failures}
            if self._closed.wait(pause):
                return
            failures = served.load(failures)
            for name in logged.keys() - failures:
                log.info("model %r is loaded and answers its share of the alias's requests", name)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def finalize(self) -> None:
        self._closed.set()
        super().finalize()


#: Triton's Python backend looks for this name.
TritonPythonModel = AliasStub

__all__ = ["TritonPythonModel"]
