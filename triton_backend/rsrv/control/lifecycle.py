"""Which models are served: following the bundles, mending what lost its stub, and loading anew when asked.

`looks`, `rounds` and `mending` decide, and are tested without a server; `rsrv_gen` writes the repository; here the two
meet Triton. In the mode `dynamic` all of it happens, in `static` and `explicit` only the mending and `reload`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from rsrv.control.looks import Looks, Seen
from rsrv.control.mending import AGREE, Mending
from rsrv.control.places import Places
from rsrv.control.rounds import Failure, Rounds
from rsrv.control.triton import HOW_TO_START, State, Triton, TritonError
from rsrv.control.view import RuntimeView
from rsrv.control.watching import sign, watch
from rsrv.settings import Settings
from rsrv_gen.aside import Replaced, version_of
from rsrv_gen.sources import SETTINGS_FILE
from rsrv_gen.update import Update, remove, update
from rsrv_gen.write import being_written, carried, newest, our_models, touch

log = logging.getLogger("rsrv.control")

T = TypeVar("T")

#: Seconds between attempts to reach a tritonserver that is loading its first models.
_KNOCK = 0.5
#: Seconds after which that is worth a line.
_LONG_START = 120.0
#: Seconds at least between two looks at who has a stub.
_BREATH = 0.2
#: Seconds that a mended model is left alone; a Triton that polls needs longer until it has seen what to load.
_PARDON = {"explicit": 10.0, "poll": 60.0, "none": 3600.0}
#: Seconds until a broken bundle is read again, although it seems to be the same.
_BROKEN_PAUSE = 60.0
#: Seconds after something unexpected.
_AFTER_ERROR = 5.0


class LifecycleError(Exception):
    """It was not done. `code` is the name of a gRPC status."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class Lifecycle:
    """The models of one tritonserver. One event loop owns it."""

    def __init__(self, settings: Settings, repository: Path, view: RuntimeView, triton: Triton) -> None:
        self._settings = settings
        self._lifecycle = settings.lifecycle
        self._repository = repository.absolute()
        self._view = view
        self._triton = triton
        self._places = Places(settings.lifecycle.bundles, self._repository / SETTINGS_FILE)
        self._looks = Looks(settings.lifecycle.look_s)
        self._rounds = Rounds()
        self._mending = Mending()
        #: Held by who writes the repository, and by who begins a load or an unload.
        self._writing = asyncio.Lock()
        #: Something is to be done, or may be.
        self._stir = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        #: Model -> its directory when Triton loaded it last.
        self._served: dict[str, tuple[int, int] | None] = {}
        #: Model -> the time of the newest file that Triton has seen of it, in nanoseconds.
        self._stamps: dict[str, int] = {}
        #: Who is to be unloaded because these metas carry it.
        self._carriers: dict[str, tuple[str, ...]] = {}
        self._unusable: set[str] = set()
        #: Why nothing can be loaded or unloaded; empty: it can.
        self._barred = triton.trouble
        if not self._barred and triton.mode == "none":
            self._barred = f"tritonserver's models are fixed; {HOW_TO_START}"

    @property
    def failures(self) -> Mapping[str, Failure]:
        """Models that are not as their bundles say, and why. An older version of them may be serving."""
        return self._rounds.failures

    @property
    def loading(self) -> Collection[str]:
        """Models that Triton is loading, or unloading."""
        return self._rounds.busy

    async def run(self) -> None:
        """Never returns."""
        await self._reach()
        if self._barred:
            log.warning("models can't be loaded, unloaded or mended: %s", self._barred)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._again(self._mend), name="mend")
                group.create_task(self._again(self._tend), name="tend")
                if self._lifecycle.mode == "dynamic":
                    watching = partial(watch, self._places.read, self._lifecycle, self._took)
                    group.create_task(self._again(watching), name="watch")
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def reload(self, name: str) -> None:
        """Loads the model anew, from its bundle as it is now; returns when that version serves. Raises LifecycleError.

        Of a model that only metas carry, these are loaded anew.
        """
        if self._barred:
            raise LifecycleError("FAILED_PRECONDITION", f"{name} can't be loaded: {self._barred}")
        names = await asyncio.to_thread(self._stands_for, name)
        if not names and not self._looks.settled(name):
            raise LifecycleError("NOT_FOUND", f"there is no model '{name}' that rsrv-gen made")
        names = names or {name}
        while under_way := [self._tasks[name] for name in names if name in self._tasks]:
            await asyncio.wait(under_way)
        done = await self._bring(names, anew=True)
        if not names.isdisjoint(done.later):
            raise LifecycleError(
                "UNAVAILABLE", f"the bundle of {name} is being written; try again when it is whole"
            )
        without = done.kept | {name for name, carriers in done.go.items() if not carriers}
        for one in names & without:
            raise LifecycleError(
                "FAILED_PRECONDITION",
                f"{one}: there is no bundle, or it is out of sight; the model is as it was",
            )
        if under_way := [self._tasks[name] for name in names if name in self._tasks]:
            await asyncio.wait(under_way)
        for one in names & self.failures.keys():
            code = "FAILED_PRECONDITION" if one in done.broken else "INTERNAL"
            raise LifecycleError(code, f"{one}: {self.failures[one].text}")

    def _stands_for(self, name: str) -> set[str]:
        """The models of the repository that a name means: itself, or the metas that carry it."""
        ours = our_models(self._repository)
        return {name} & ours or {meta for meta in ours if name in carried(self._repository / meta)}

    # --- what never ends ------------------------------------------------------------------------------------------

    async def _reach(self) -> None:
        """Returns when Triton answers: it does so when its first models are loaded."""
        silent_since: float | None = self._now()
        while not self._triton.trouble:
            try:
                await self._triton.states()
                return
            except TritonError as error:
                if silent_since is not None and self._now() - silent_since > _LONG_START:
                    log.warning("tritonserver does not answer at %s yet: %s", self._triton.address, error)
                    silent_since = None
            await asyncio.sleep(_KNOCK)

    async def _again(self, work: Callable[[], Awaitable[None]]) -> None:
        """One fault of ours must not end the rest."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("unexpected; going on in %g s", _AFTER_ERROR)
                await asyncio.sleep(_AFTER_ERROR)

    def _took(self, seen: Mapping[Path, Seen]) -> bool:
        """Takes a look at the bundles."""
        before = self._looks.agreed
        changed, told = self._looks.look(seen, self._now())
        for line in told:
            log.warning("%s", line)
        self._rounds.changed(changed)
        if changed or self._looks.agreed != before:
            self._stir.set()
        return self._looks.restless

    async def _tend(self) -> None:
        """Does what is due."""
        first = self._lifecycle.mode == "dynamic"
        while True:
            self._stir.clear()
            if first and self._looks.agreed:
                # Whatever changed while nobody looked.
                self._rounds.due(self._now())
                await self._bring(None)
                first = False
            if not first:
                if due := self._rounds.due(self._now()):
                    await self._bring(due)
                await self._let_go()
            at = self._rounds.next_time()
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which forgets that it was cancelled when something stirs at that moment.
                async with asyncio.timeout_at(at):
                    await self._stir.wait()

    async def _let_go(self) -> None:
        async with self._writing:
            for name in self._rounds.leavers(self._now()):
                if await self._may_leave(name):
                    self._start(name, self._unload(name))
                else:
                    self._rounds.stay(name)
                    if self.failures.keys().isdisjoint(self._carriers.get(name, ())):
                        # Its bundle seems to be back, or who carries it is not there yet: nothing else may say so when
                        # that changes. A carrier that failed is tried again, and this one with it.
                        self._rounds.later(name, self._now() + self._lifecycle.poll_s)

    async def _may_leave(self, name: str) -> bool:
        if carriers := self._carriers.get(name):
            return all(self._carries(meta, name) for meta in carriers)
        if not self._looks.gone(name):
            return False
        # One whose bundle was never seen may come from a place that an rsrv-gen is about to name.
        return self._looks.knew(name) or await asyncio.to_thread(self._all_places_seen)

    def _carries(self, meta: str, name: str) -> bool:
        """Whether a meta model serves that has this one with it."""
        loaded = meta in self._served and meta not in self._tasks and meta not in self.failures
        return loaded and name in carried(self._repository / meta)

    def _all_places_seen(self) -> bool:
        return not being_written(self._repository) and set(self._places.read()) == set(self._looks.roots)

    async def _mend(self) -> None:
        """Finds models whose stub is dead, and has them loaded anew."""
        ours: set[str] = set()
        #: Models without a stub that Triton does not call ready, so that it need not be asked at every change.
        idle: set[str] = set()
        renewed = -self._lifecycle.poll_s
        while True:
            seen = self._view.changes
            if self._now() - renewed >= self._lifecycle.poll_s:
                renewed = self._now()
                ours, idle = await asyncio.to_thread(our_models, self._repository), set()
            alive = {name for name, pids in self._view.stubs().items() if pids}
            without = ours - alive - set(self._rounds.busy)
            idle &= without
            ready: set[str] = set()
            if without - idle and not self._triton.trouble:
                with contextlib.suppress(TritonError):
                    states = await self._triton.states()
                    ready = {name for name in without if states.get(name) == "ready"}
                    ready -= set(self._rounds.busy)
                    idle = without - ready
            up_since = self._view.since if self._view.up else None
            if dead := self._mending.look(ready, alive, up_since, self._now()):
                async with self._writing:
                    for name in dead - set(self._rounds.busy):
                        self._replace(name)
            await asyncio.sleep(_BREATH)
            with contextlib.suppress(TimeoutError):
                wait = AGREE - _BREATH if self._mending.suspicious else self._lifecycle.poll_s
                async with asyncio.timeout(wait):
                    await self._view.wait_change(seen)

    def _replace(self, name: str) -> None:
        """Its stub is dead."""
        self._mending.pardon(name, self._now() + _PARDON[self._triton.mode])
        if self._barred:
            text = f"its stub process is dead, and it can't be loaded anew: {self._barred}"
            self._fail(name, text, again=False)
        else:
            log.warning("%s: its stub process is dead; loading it anew", name)
            self._start(name, self._load(name, anew=True))

    # --- what is done ---------------------------------------------------------------------------------------------

    async def _bring(self, names: Collection[str] | None, *, anew: bool = False) -> Update:
        """Brings models (None: all) up to date in the repository; what was done.

        Their loads have begun when this returns. `anew`: also of those that are up to date.
        """
        async with self._writing:
            done = await asyncio.to_thread(self._update, names)
            self._report(done)
            if self._lifecycle.mode == "dynamic":
                # What broke them may be the disk's, and pass without a change that a look would see.
                for name in done.broken if names is None else done.broken.keys() & set(names):
                    self._rounds.later(name, self._now() + _BROKEN_PAUSE)
            if names is None:
                await self._spare_dismissed()
            for name, put in done.put.items():
                self._rounds.stay(name)
                self._stamps[name] = newest(self._repository / name)
                self._start(name, self._load(name, put))
            for name in done.unchanged:
                self._rounds.stay(name)
                folder = self._repository / name
                here = names is not None and name in names
                if name in self._tasks:
                    continue
                # What failed though nothing is to be written lost its stub, and still has none.
                wanted = (anew and here) or name in self._rounds.failures
                if not self._barred and (wanted or self._served.get(name) != version_of(folder)):
                    self._start(name, self._load(name, anew=names is not None))
                else:
                    self._rounds.done(name)
            for name, carriers in done.go.items():
                if self._barred:
                    self._fail(
                        name, f"its bundle is gone, and it can't be unloaded: {self._barred}", again=False
                    )
                else:
                    self._carriers[name] = carriers
                    self._rounds.leave(name)
            for name in done.later:
                self._rounds.later(name, self._now() + self._lifecycle.poll_s)
            # Of the rest there is neither a bundle nor a model.
            known = [done.put, done.unchanged, done.go, done.broken, done.failed, done.later]
            if self._lifecycle.mode != "dynamic":
                known.append(done.kept)  # nobody looks whether it is back
            for name in set(names or ()).difference(*known):
                if name in self._served and not self._barred:
                    # Another rsrv-gen has removed it.
                    self._carriers.pop(name, None)
                    self._rounds.leave(name)
                else:
                    self._rounds.done(name)
        self._stir.set()
        return done

    async def _spare_dismissed(self) -> None:
        """Whoever unloaded a model by hand meant it, until its bundle changes: it counts as served."""
        states: Mapping[str, State] = {}
        with contextlib.suppress(TritonError):
            states = await self._triton.states()
        for name in [name for name, state in states.items() if state == "dismissed"]:
            self._served[name] = version_of(self._repository / name)

    def _update(self, names: Collection[str] | None) -> Update:
        """On a thread: brings the repository up to date."""
        watched = self._lifecycle.mode == "dynamic"
        return update(
            self._repository,
            self._places.read(),
            names,
            link=self._lifecycle.link,
            transport=self._settings.meta.transport,
            stays=self._stays,
            ready=lambda name: name not in self._tasks and (not watched or self._is_whole(name)),
            write=not self._barred,
            later_than=self._stamps,
        )

    def _stays(self, name: str) -> str:
        return "" if self._looks.gone(name) else "its bundle is out of sight"

    def _is_whole(self, name: str) -> bool:
        """Whether the bundle is on disk as the looks agreed that it is."""
        found = self._looks.settled(name)
        linked = self._lifecycle.link == "hard"
        return bool(found) and all(
            sign(self._place(root, name), linked=linked) == was for root, was in found or ()
        )

    def _place(self, root: Path, name: str) -> Path:
        return root if root.name == name and (root / "manifest.yaml").exists() else root / name

    def _report(self, done: Update) -> None:
        """Takes what could not be done."""
        for line in set(done.unusable) - self._unusable:
            log.warning("no bundles: %s", line)
        self._unusable = set(done.unusable)
        # What is being copied is broken for the moment, and nobody's fault.
        found = {name: text for name, text in done.broken.items() if self._looks.settled(name) is not None}
        for name, failure in self._rounds.broken(found, time.time()).items():
            log.error("%s stays as it was: %s", name, failure.text)
        for name, text in done.failed.items():
            self._fail(name, f"{text}: {self._barred}" if self._barred else text, again=not self._barred)

    async def _load(self, name: str, put: Replaced | None = None, *, anew: bool = False) -> None:
        """Has Triton load what is in the repository; if that fails, `put` is taken back. `anew`: although unchanged."""
        folder = self._repository / name
        started = self._now()
        try:
            version = await asyncio.to_thread(version_of, folder)
            if anew:
                self._stamps[name] = await asyncio.to_thread(touch, folder, self._stamps.get(name, 0))
            await self._triton.load(name)
        except Exception as error:
            if put is not None:
                await asyncio.to_thread(put.undo)
            if not isinstance(error, TritonError | OSError):
                raise
            self._fail(name, f"could not be loaded: {error}")
        else:
            if put is not None:
                await asyncio.to_thread(put.forget)
            if put is not None or anew:
                log.info("%s is loaded, after %.1f s", name, self._now() - started)
            self._served[name] = version
            self._rounds.done(name)

    async def _unload(self, name: str) -> None:
        try:
            await self._triton.unload(name)
            await asyncio.to_thread(remove, self._repository, name, self._lifecycle.link)
        except (TritonError, OSError, ValueError) as error:
            self._fail(name, f"could not be unloaded: {error}")
        else:
            self._served.pop(name, None)
            self._carriers.pop(name, None)
            self._rounds.done(name)
            log.info("%s is unloaded: its bundle is gone", name)

    def _fail(self, name: str, text: str, *, again: bool = True) -> None:
        failure = self._rounds.failed(name, text, self._now(), time.time(), again=again)
        # The same again and again is worth a line now and then.
        if failure.tries & (failure.tries - 1) == 0:
            log.error("%s (attempt %d): %s", name, failure.tries, failure.text)

    def _start(self, name: str, work: Awaitable[None]) -> None:
        """Begins a load or an unload; there is none of this model under way."""
        self._rounds.begin(name, self._now())
        task = self._tasks[name] = asyncio.create_task(self._guarded(name, work), name=f"load {name}")
        task.add_done_callback(lambda _: self._ended(name))

    async def _guarded(self, name: str, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            log.exception("%s: unexpected", name)
            self._fail(name, f"unexpected: {error!r}")

    def _ended(self, name: str) -> None:
        del self._tasks[name]
        self._stir.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
