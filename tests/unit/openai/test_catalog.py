"""The catalogue of models that callers can name. Each of these models has a task."""

from __future__ import annotations

from typing import Any

import pytest

from rsrv.openai.catalog import TaskCatalog
from rsrv.openai.errors import ApiError
from rsrv.openai.inference import TaskModel
from tests.waiting import looped


class Server:
    """A backend with the states of some models. Only ready models have a configuration."""

    address = "localhost:8001"

    def __init__(self, **states: str) -> None:
        self.states = states

    async def index(self) -> dict[str, str]:
        return self.states

    async def task(self, name: str) -> TaskModel:
        if self.states.get(name) != "READY":
            raise ApiError(404, "NOT_FOUND", "Request for unknown model")
        return TaskModel(name, "feature-extraction", {}, {})


async def refusal(catalog: TaskCatalog, name: str) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await catalog.get(name)
    return refused.value


@looped
async def test_a_model_that_starts_is_not_called_unknown() -> None:
    """A client that calls a starting model is asked to try again. A model that failed or does not exist is unknown."""
    server: Any = Server(ready="READY", starts="LOADING", failed="UNAVAILABLE")
    catalog = TaskCatalog(server)
    await catalog.refresh()

    assert (await catalog.get("ready")).name == "ready"
    error = await refusal(catalog, "starts")
    assert (error.status, error.code, error.headers) == (503, "STARTING", {"Retry-After": "1"})
    assert [(await refusal(catalog, name)).status for name in ("failed", "other")] == [404, 404]

    server.states["starts"] = "READY"
    assert (await catalog.get("starts")).name == "starts"
