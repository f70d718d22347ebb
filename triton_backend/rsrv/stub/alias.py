"""The entry of Triton's Python backend for an alias: a name of its own for clients, with one model behind it or several.

The stub of an alias attaches to the runtime as the stubs of its targets do, so a request costs what it costs by the
model's own name. Which target answers follows from the shares in config.pbtxt. When they change, the control process
writes the alias again, and Triton loads it beside the one that serves, as after any other change: so no request is lost,
and there is no second way for settings into a stub.
"""

import asyncio  # noqa: F401  Triton's stub imports it lazily, as in `model`
import json
import logging
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Protocol

from rsrv import logs
from rsrv.hooks.loader import HookError
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.model import serve_model, set_up
from rsrv.stub.replicas import StubProcess
from rsrv.stub.replies import Responses
from rsrv.stub.request import parse_parameters
from rsrv.stub.session import UNREACHABLE
from rsrv.stub.shadow import Shadow
from rsrv.stub.tensors import BrokenPairing, Tensors
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

#: parameter of requests: those of one value go to one target, as long as the shares stay
STICKY = "rsrv_sticky"
#: in place of a weight: the target gets copies of all requests
SHADOW = "shadow"
#: in config.pbtxt: the shares by target, as a JSON object
_PARAMETER = "rsrv_alias"


class AliasTarget(Protocol):
    """A model behind an alias: `Replicas`, or a `ColdModel`."""

    @property
    def ready(self) -> bool: ...

    @property
    def execute(self) -> Callable[[Sequence[Any]], list[Any] | None]:
        """Answer Triton's requests, as `EntryPoint.execute`."""

    def execute_later(self, requests: Sequence[Any]) -> None:
        """Answer them after execute() returned."""

    def compared(self, outcome: str) -> None:
        """Count an answer that was compared with that of another target."""

    def close(self) -> None: ...


class TargetResponses(Responses):
    """Responses whose errors name the alias and the target. All targets of a process owe their replies together."""

    def __init__(self, pb_utils: Any, where: str, together: Responses | None) -> None:
        super().__init__(pb_utils)
        self._where = where
        if together is not None:
            self._owed = together._owed

    def failure(self, status: Status, text: str, *, sub_call: bool = False) -> Any:
        return super().failure(status, f"{self._where}: {text}", sub_call=sub_call)


class Split:
    """The choice of each request's target: by chance, or by the hash of what the request sticks to."""

    def __init__(
        self, alias: str, weights: Mapping[str, float | str], draw: Callable[[], float] = random.random
    ) -> None:
        """`draw` returns a number from 0 below 1."""
        #: makes the hash differ from one alias to the next
        self._salt = f"{alias}\0"
        shares = {name: float(weight) for name, weight in weights.items() if weight and weight != SHADOW}
        self._names = list(shares)
        #: upper ends of the shares: a weight that grows moves only requests that it gains
        self._ends = list(accumulate(shares.values()))
        self._draw = draw

    def choose(self, request: Any) -> str:
        """Return the target of one of Triton's requests; never raises."""
        if len(self._names) == 1:
            return self._names[0]
        point = self._sticky_point(request)
        if point is None:
            point = self._draw()
        return self._names[min(bisect_right(self._ends, point * self._ends[-1]), len(self._names) - 1)]

    def _sticky_point(self, request: Any) -> float | None:
        try:
            text = request.parameters()
            value = parse_parameters(text).get(STICKY) if len(text) > 2 else None
        except Exception:  # noqa: BLE001 - the target refuses the request
            return 0.0
        if value is None:
            return None
        digest = blake2b(f"{self._salt}{value}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


class Alias:
    """Answers Triton's requests for one alias by its targets."""

    def __init__(
        self, split: Split, targets: Mapping[str, AliasTarget], final: int, shadows: Sequence[Shadow] = ()
    ) -> None:
        """`final` is Triton's flag of a response that is the last one."""
        self._final = final
        self._split = split
        self._targets = targets
        self._shadows = shadows

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer Triton's requests, as `EntryPoint.execute`."""
        return self._execute_watched(requests) if self._shadows else self._execute(requests)

    def _execute_watched(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer requests, and then have the shadows answer copies of them."""
        watched, comparisons = list(requests), []
        for shadow in self._shadows:
            for index, request in enumerate(watched):
                if (comparison := shadow.begin(request)) is not None:
                    watched[index] = comparison.watched
                    comparisons.append((index, shadow, comparison))
        responses = self._execute(watched)
        if responses is not None:
            for index, _, comparison in comparisons:
                comparison.answered(responses[index], copy=False)
        for shadow in self._shadows:
            if copies := [one.copy for _, other, one in comparisons if other is shadow]:
                shadow.execute(copies)
        return responses

    def _execute(self, requests: Sequence[Any]) -> list[Any] | None:
        chosen, parts = [self._split.choose(request) for request in requests], dict[str, list[Any]]()
        for name, request in zip(chosen, requests, strict=True):
            parts.setdefault(name, []).append(request)
        if len(parts) == 1:
            return self._targets[chosen[0]].execute(requests)
        # In place, as the requests of one model: a request that is answered later has no answer if this process dies.
        answers = {name: self._targets[name].execute(part) for name, part in parts.items()}
        whole = {name: iter(found) for name, found in answers.items() if found is not None}
        if len(whole) == len(parts):
            return [next(whole[name]) for name in chosen]
        # A list that execute() returns has to be whole.
        for name, request in zip(chosen, requests, strict=True):
            if name in whole:
                self._send(request, next(whole[name]))
        return None

    def _send(self, request: Any, response: Any) -> None:
        try:
            request.get_response_sender().send(response, flags=self._final)
        except Exception:
            # The other requests have answers already, or still get them.
            log.exception("a request could not be answered")

    @property
    def ready(self) -> bool:
        return all(one.ready for one in self._targets.values())

    def close(self) -> None:
        for shadow in self._shadows:
            shadow.close()
        for one in self._targets.values():
            one.close()


class AliasStub:
    """The stub of one alias."""

    def initialize(self, args: dict[str, str]) -> None:
        """Return when all targets are ready, or cold. Raises TritonModelException with the reason otherwise."""
        import triton_python_backend_utils as pb_utils

        setup = set_up(args, pb_utils)
        alias, folder = setup.name, setup.bundle.parent / "calls"
        shares: dict[str, Any] = json.loads(setup.config["parameters"][_PARAMETER]["string_value"])
        guard, targets, shadows, together = HookGuard(), {}, [], None
        dtypes = {wire.name: wire.dtype for wire in setup.outputs}
        try:
            tensors = Tensors(pb_utils)
            for target, weight in shares.items():
                copies = weight == SHADOW
                own = replace(setup, name=target, bundle=folder / target, alias=alias, copies=copies)
                where = f"alias {alias!r}, model {target!r}"
                together = TargetResponses(pb_utils, where, together)
                found = serve_model(own, tensors, StubProcess(together, guard), pb_utils)
                targets[target] = found
                if copies:
                    shadows.append(Shadow(where, tensors, dtypes, found.execute_later, found.compared))
        except (*UNREACHABLE, BrokenPairing, HookError) as error:
            for one in targets.values():
                one.close()
            raise pb_utils.TritonModelException(f"alias {alias!r}, model {target!r}: {error}") from None
        self._alias = Alias(
            Split(alias, shares), targets, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL, shadows
        )

    def execute(self, requests: list[Any]) -> list[Any] | None:
        return self._alias.execute(requests)

    def is_ready(self) -> bool:
        """Tell Triton 26.03 and later whether the alias is ready."""
        return self._alias.ready

    def finalize(self) -> None:
        self._alias.close()
        logs.flush()


#: the name that Triton's Python backend looks for
TritonPythonModel = AliasStub

__all__ = ["TritonPythonModel"]
