"""The lines that `rsrv serve` prints when a model's state changes."""

import asyncio
import os
import socket
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from rsrv.address import Address
from rsrv.control.v1 import control_pb2 as pb
from rsrv.serve import view
from rsrv.serve.view import Changes, endpoints
from tests.unit.serve.test_plan import planned


def status(*, failures: dict[str, str] | None = None, **models: tuple[str, int]) -> pb.GetStatusResponse:
    """Return a status with these models, each with the key and the state of its version."""
    return pb.GetStatusResponse(
        models=[
            pb.ModelStatus(name=name, versions=[pb.Version(key=key, state=state, error="no memory")])  # type: ignore[arg-type]
            for name, (key, state) in models.items()
        ],
        failures=[pb.Failure(name=name, text=text) for name, text in (failures or {}).items()],
    )


def test_each_change_is_shown_once() -> None:
    """A model becomes ready, gets a new bundle, and goes; looks without a change say nothing."""
    changes = Changes({})
    loading, one, two = ("a@1", pb.STATE_LOADING), ("a@1", pb.STATE_READY), ("a@2", pb.STATE_READY)
    assert list(changes.update(status(a=loading))) == []
    assert list(changes.update(status(a=one))) == ["a is ready"]
    assert list(changes.update(status(a=one))) == []
    assert list(changes.update(status(a=two))) == ["a serves its new bundle"]
    assert changes.counts() == (1, 0)
    assert list(changes.update(status())) == ["a is removed"]
    assert changes.counts() == (0, 0)


def test_a_failure_is_shown_with_its_reason_and_so_is_its_end() -> None:
    """A version that cannot be loaded, and a bundle that cannot be read, are named; repaired, the model is ready."""
    changes = Changes({})
    assert list(changes.update(status(a=("a@1", pb.STATE_FAILED)))) == ["a failed: no memory"]
    said = changes.update(status(a=("a@2", pb.STATE_READY), failures={"b": "no\nmanifest"}))
    assert list(said) == ["a is ready", "b failed: no manifest"]
    assert changes.counts() == (1, 1)


def test_a_bundle_that_was_named_before_the_start_is_counted_and_not_named_again() -> None:
    """What the generator refused has been printed: the same reason from the server adds no line."""
    changes = Changes({"b": "no manifest"})
    assert list(changes.update(status())) == []
    assert list(changes.update(status(failures={"b": "no manifest"}))) == []
    assert changes.counts() == (0, 1)
    assert list(changes.update(status())) == ["b is removed"]


def test_endpoints_are_what_a_client_here_connects_to() -> None:
    """An address that listens everywhere is shown as localhost; a page that is not there is left out."""
    ports = {
        "http": Address("0.0.0.0", 9000),
        "grpc": Address("127.0.0.1", 8001),
        "metrics": Address("10.0.0.1", 9002),
    }
    shown = endpoints(ports, None, Path("serve.log")).split("\n")
    assert [line.split()[-1] for line in shown] == [
        "http://localhost:9000",
        "localhost:8001",
        "http://10.0.0.1:9002/metrics",
        "serve.log",
    ]


def test_without_a_control_service_no_models_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may serve any number of models: the line must not say that there are none."""
    (tmp_path / "cats").mkdir()
    monkeypatch.setattr(view, "CONTROL_S", 0.0)

    async def no_service(*_: object) -> None:
        return None

    monkeypatch.setattr(view, "_changes", no_service)

    async def first() -> view.Line:
        with socket.create_server(("127.0.0.1", 0)) as http:
            ports = {"http": Address("127.0.0.1", http.getsockname()[1])}
            plan = replace(planned(), ports=ports, repository=tmp_path)
            async with aclosing(view.follow(plan, os.getpid(), {})) as lines:
                return await anext(lines)

    assert asyncio.run(first()) == view.Line("Serving; which models, only the log shows", "serves")
