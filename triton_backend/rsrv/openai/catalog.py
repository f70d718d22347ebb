"""The models with a task, as the server lists them."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from rsrv.openai.errors import ApiError, starting_model, unknown_model
from rsrv.openai.inference import LOADING, READY, Backend, TaskModel

log = logging.getLogger(__name__)

#: Seconds between two requests for the list of models.
_REFRESH_S = 5.0
#: Maximum number of configurations that are requested at a time.
_AT_ONCE = 8


class TaskCatalog:
    """The models of a backend. Call `follow` in a task."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._models: dict[str, TaskModel] = {}
        #: Ready models whose configurations had no task.
        self._without: set[str] = set()
        #: Models that were starting when the models were last listed.
        self._starting: set[str] = set()
        self._places = asyncio.Semaphore(_AT_ONCE)
        #: Reason why the list is not available; empty if it is.
        self.problem = ""

    @property
    def models(self) -> Mapping[str, TaskModel]:
        return self._models

    async def follow(self) -> None:
        """Update the list of models until the task is cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(_REFRESH_S)

    async def refresh(self) -> None:
        """Request the list of models, and the configurations of new models and of models with a task."""
        try:
            states, problem = await self._backend.index(), ""
            names = {name for name, state in states.items() if state == READY}
            self._starting = {name for name, state in states.items() if state == LOADING}
        except ApiError as error:
            # Without the list, update at least the models that are known already.
            names, problem = set(self._models), str(error)
            self._starting = set()
        if problem and problem != self.problem:
            log.warning("the models of %s cannot be listed: %s", self._backend.address, problem)
        self.problem = problem
        for name in self._models.keys() - names:
            del self._models[name]
        self._without &= names
        candidates = sorted(names - self._without)
        for name, model in zip(candidates, await asyncio.gather(*map(self._try, candidates)), strict=True):
            if model is None and name not in self._models:
                self._without.add(name)

    async def get(self, name: str) -> TaskModel:
        """Return a model. Ask the server for it if it is not known. Raises ApiError."""
        if model := self._models.get(name):
            return model
        if model := await self._ask(name):
            self._without.discard(name)
            return model
        raise starting_model(name) if name in self._starting else unknown_model(name)

    async def _try(self, name: str) -> TaskModel | None:
        with suppress(ApiError):
            return await self._ask(name)
        return None

    async def _ask(self, name: str) -> TaskModel | None:
        """Ask for the configuration of a model. Raises ApiError if the server does not answer."""
        try:
            async with self._places:
                model = await self._backend.task(name)
        except ApiError as error:
            if error.status not in (400, 404):
                raise
            model = None
        if model is None:
            self._models.pop(name, None)
        else:
            # Keep the time at which the model was first seen.
            created = self._models.get(name, model).created
            self._models[name] = replace(model, created=created)
        return model
