"""Aliases: which target answers a request, and what clients learn about the target."""

from __future__ import annotations

import json
import queue
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rsrv.hooks.loader import HookError
from rsrv.stub.alias import Alias, AliasStub, Split, TargetResponses
from rsrv.stub.hook_import import HookImport
from rsrv.stub.metrics import Meters
from rsrv.stub.model import Setup
from rsrv.stub.replies import Responses
from rsrv.stub.session import Launcher
from rsrv.wire.frames import Status
from tests.fakes import FakePbUtils, FakeRequest
from tests.waiting import PATIENCE_S

RESPONSES = Responses(FakePbUtils)


def request(sticky: object = None) -> FakeRequest:
    return FakeRequest({}, parameters="{}" if sticky is None else json.dumps({"rsrv_sticky": sticky}))


class Target:
    """A target that answers with its name, either as the result of execute() or later by a sender."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = self.later = False

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        if self.later:
            self.execute_later(requests)
            return None
        return [self.name] * len(requests)

    def execute_later(self, requests: Sequence[Any]) -> None:
        for client_request in requests:
            client_request.get_response_sender().send(
                self.name, FakePbUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )

    def compared(self, outcome: str) -> None: ...

    def close(self) -> None:
        self.closed = True


def loaded(name: str, weights: Mapping[str, float | str], targets: Mapping[str, Any]) -> Alias:
    """Return an alias that has loaded these targets."""
    alias = Alias(Split(name, weights), lambda target: (targets[target], None), RESPONSES)
    assert alias.load(targets) == {}
    return alias


def test_requests_are_split_by_weight() -> None:
    """Each target's share of 10,000 requests is within four standard deviations of its weight. A weight of 0 gets none."""
    split = Split("fraud", {"v7": 95, "v8": 5, "idle": 0}, random.Random(1).random)

    counts = Counter(split.choose(request()) for _ in range(10_000))

    assert abs(counts["v8"] - 500) < 4 * (10_000 * 0.05 * 0.95) ** 0.5
    assert counts.keys() == {"v7", "v8"}


def test_requests_of_one_value_stick_to_a_target() -> None:
    """Requests with the same sticky value go to the same target in every process, because the value's hash decides.

    The values are divided among the targets by weight.
    """
    split, other = (Split("fraud", {"v7": 80, "v8": 20}) for _ in range(2))

    chosen = [split.choose(request(f"user {number}")) for number in range(2000)]

    assert [other.choose(request(f"user {number}")) for number in range(2000)] == chosen
    assert abs(chosen.count("v8") - 400) < 4 * (2000 * 0.2 * 0.8) ** 0.5


def test_a_target_that_gets_more_takes_none_of_its_own_requests_away() -> None:
    """If the weight of a target grows, requests with some sticky values move to it. All its earlier values stay.

    Another alias divides the same values differently.
    """
    values = [request(number) for number in range(1000)]

    before = [Split("fraud", {"v7": 95, "v8": 5}).choose(sticky_request) for sticky_request in values]
    after = [Split("fraud", {"v7": 70, "v8": 30}).choose(sticky_request) for sticky_request in values]

    assert all(now == "v8" for was, now in zip(before, after, strict=True) if was == "v8")
    assert [Split("other", {"v7": 70, "v8": 30}).choose(sticky_request) for sticky_request in values] != after


@pytest.mark.parametrize("weight", [10, 90])
def test_a_changed_weight_moves_no_sticky_requests_between_other_targets(weight: int) -> None:
    """If one of three weights changes, sticky requests move only to its target, or only away from it.

    No more of them move than the new weights require.
    """
    values = [request(number) for number in range(2000)]
    before = Split("fraud", {"v7": 50, "v8": 30, "v9": 20})
    after = Split("fraud", {"v7": 50, "v8": 30, "v9": weight})

    moves = Counter((before.choose(value), after.choose(value)) for value in values)

    moved = {(was, now) for was, now in moves if was != now}
    assert moved == ({("v9", "v7"), ("v9", "v8")} if weight < 20 else {("v7", "v9"), ("v8", "v9")})
    share = abs(weight / (80 + weight) - 0.2)
    count = sum(moves[pair] for pair in moved)
    assert abs(count - 2000 * share) < 4 * (2000 * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("parameters", ["[", "[1]", '{"rsrv_sticky": [{}]}', '{"rsrv_sticky": "\\ud800"}'])
def test_parameters_of_any_kind_find_a_target(parameters: str) -> None:
    """A request with wrong parameters goes to one of the targets, which then refuses it."""
    assert Split("fraud", {"v7": 1, "v8": 1}).choose(FakeRequest({}, parameters=parameters)) in ("v7", "v8")


def test_a_batch_whose_targets_answer_in_place_is_answered_in_place() -> None:
    """If all targets answer in place, execute() returns one list of answers in the order of the requests."""
    fraud = loaded("fraud", {"v7": 1, "v8": 1}, {name: Target(name) for name in ("v7", "v8")})
    champion = loaded("champion", {"v8": 1}, {"v8": Target("v8")})
    batch = [request(number) for number in range(20)]
    each = [answer for client_request in batch for answer in fraud.execute([client_request]) or ()]

    assert champion.execute(batch) == ["v8"] * 20
    assert set(each) == {"v7", "v8"}
    assert fraud.execute(batch) == each


def test_a_batch_of_which_a_target_answers_later_is_answered_by_senders() -> None:
    """If one target answers later, execute() returns None, and each request of the batch gets one answer by its sender."""
    targets = {name: Target(name) for name in ("v7", "v8")}
    targets["v8"].later = True
    fraud = loaded("fraud", {"v7": 1, "v8": 1}, targets)
    batch = [request(number) for number in range(20)]
    split = Split("fraud", {"v7": 1, "v8": 1})

    assert fraud.execute(batch) is None
    answers: list[Any] = [client_request.answers.get_nowait() for client_request in batch]
    assert answers == [split.choose(client_request) for client_request in batch]
    assert all(client_request.answers.empty() for client_request in batch)


def test_an_alias_that_ends_closes_all_targets() -> None:
    """The end of an alias closes all its targets, including the shadow."""
    targets = {name: Target(name) for name in ("v7", "v8", "v9")}
    alias = loaded("fraud", {"v7": 1, "v8": 1, "v9": "shadow"}, targets)

    alias.close()

    assert all(target.closed for target in targets.values())


def test_a_target_that_does_not_load_gets_no_requests_until_it_does() -> None:
    """While a target has not loaded, the other targets get its requests, divided by their weights. They keep their own requests.

    This also holds for sticky values. Any error of a load, even SystemExit, is reported as a failed load.
    """
    weights = {"v7": 60, "v8": 20, "v9": 20}
    targets = {name: Target(name) for name in weights}
    errors: list[BaseException] = [HookError("model.py: no"), SyntaxError("what"), SystemExit(3)]

    def load(name: str) -> tuple[Any, None]:
        if name == "v8" and errors:
            raise errors.pop(0)
        return targets[name], None

    alias, whole = Alias(Split("fraud", weights), load, RESPONSES), Split("fraud", weights)
    batch = [request(number) for number in range(2000)]

    failures = alias.load(weights)
    answers = alias.execute(batch) or []
    reasons = [failures["v8"], *(alias.load(failures)["v8"] for _ in range(2))]

    assert reasons == ["model.py: no", "SyntaxError: what", "SystemExit: 3"]
    assert all(
        was == now
        for client_request, now in zip(batch, answers, strict=True)
        if (was := whole.choose(client_request)) != "v8"
    )
    assert abs(answers.count("v7") - 1500) < 4 * (2000 * 0.75 * 0.25) ** 0.5
    assert alias.execute(batch) == answers
    assert alias.load(failures) == {}
    assert alias.execute(batch) == [whole.choose(client_request) for client_request in batch]


def test_a_target_that_loads_after_the_end_is_closed() -> None:
    """If a target is loaded after its alias was closed, the target is closed at once."""
    late: Any = Target("v8")
    alias = Alias(Split("fraud", {"v8": 1}), lambda name: (late, None), RESPONSES)

    alias.close()
    alias.load(["v8"])

    assert late.closed


def test_reports_name_the_alias() -> None:
    """Reports of an alias's target have the alias's name. Reports of a model's own stub have no name."""
    meters = Meters()
    plain = meters.take()
    meters.alias = "fraud"

    assert meters.take() == plain | {"alias": "fraud", "shadows": {}}


def test_errors_name_the_alias_and_the_target() -> None:
    """An error names the alias and the model that refused the request."""
    responses = TargetResponses(FakePbUtils, "alias 'fraud', model 'v8'", Responses(FakePbUtils))

    response = responses.failure(Status.QUEUE_FULL, "the queue is full")

    assert response.error.message == "[rsrv:QUEUE_FULL] alias 'fraud', model 'v8': the queue is full"


def test_each_attempt_to_load_a_target_waits_for_the_same_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging import of model.py cannot be stopped, so further attempts to load the target wait for this import."""
    imports: queue.SimpleQueue[object] = queue.SimpleQueue()

    def serve(setup: Setup, process: object, pb_utils: object, hooks: object) -> Target:
        if setup.name == "b":
            imports.put(hooks)
            raise HookError("the import of model.py has taken 60 s")
        return Target(setup.name)

    monkeypatch.setattr("rsrv.stub.alias.serve_model", serve)
    monkeypatch.setattr("rsrv.stub.alias._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("rsrv.stub.model.bound_exit", lambda: None)
    config = {"parameters": {"rsrv_alias": {"string_value": '{"a": 1, "b": 1}'}}}
    launcher = Launcher(1, "0", tmp_path, tmp_path, {})
    stub = AliasStub()
    stub._served = stub.serve(Setup("c", config, tmp_path / "bundle", [], False, launcher, "1"), FakePbUtils)
    try:
        first, second = (imports.get(timeout=PATIENCE_S) for _ in range(2))
        assert first is second
        assert isinstance(first, HookImport)
    finally:
        stub.finalize()
