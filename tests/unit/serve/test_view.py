"""The lines that `rsrv serve` prints when a model's state changes."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rsrv.address import Address
from rsrv.control.v1 import control_pb2 as pb
from rsrv.serve import view
from rsrv.serve.node import Serving
from rsrv.serve.view import Changes, endpoints
from rsrv.settings import load_settings


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
    """An address that listens everywhere is shown as localhost; a port that is closed is left out."""
    settings = load_settings(
        "gateway: {grpc: null, http: '0.0.0.0:9000', admin: '10.0.0.1:9002'}", "rsrv.yaml"
    )
    shown = endpoints(settings, ["http://127.0.0.1:8004/"], Path("serve.log")).split("\n")
    assert [line.split()[-1] for line in shown] == [
        "http://localhost:9000",
        "http://10.0.0.1:9002/metrics",
        "http://127.0.0.1:8004/",
        "serve.log",
    ]


def test_without_a_control_service_no_models_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may serve any number of models: the line must not say that there are none."""
    (tmp_path / "cats").mkdir()
    monkeypatch.setattr(view, "CONTROL_S", 0.0)

    async def listens(_: object) -> bool:
        return True

    async def no_service(*_: object) -> None:
        return None

    monkeypatch.setattr(view, "listens", listens)
    monkeypatch.setattr(view, "_changes", no_service)
    worker: Any = SimpleNamespace(ports=SimpleNamespace(http=None), repository=tmp_path)
    shown: list[str] = []

    def say(line: str) -> None:
        shown.append(line)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(view.follow(worker, os.getpid(), Serving(load_settings(), (), {}), tmp_path, say))
    assert shown[0].startswith("\nServing; which models, only the log shows:\n")


def test_a_gateway_is_served_from_when_it_has_found_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens before, and refuses requests. Its servers have the same models, so each line names one."""
    monkeypatch.setattr(view, "LOOK_S", 0.0)
    found = iter((False, True))
    asked: list[object] = []

    async def listens(_: object) -> bool:
        return True

    async def takes_requests(gateway: object) -> bool:
        asked.append(gateway)
        return next(found)

    monkeypatch.setattr(view, "listens", listens)
    monkeypatch.setattr(view, "takes_requests", takes_requests)
    ports, child = SimpleNamespace(http=None), SimpleNamespace(name="worker1")
    worker: Any = SimpleNamespace(ports=ports, child=child, repository=tmp_path)
    admin = Address("127.0.0.1", 8002)
    shown: list[str] = []

    def say(line: str) -> None:
        shown.append(line)
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(view.follow(worker, os.getpid(), Serving(load_settings(), (), {}, admin), tmp_path, say))
    assert shown[0].startswith("\nServing 0 of 0 models on worker1:\n")
    assert asked == [admin, admin]
