"""Which models are served: following the bundles, mending what lost its stub, and loading anew when asked.

`bundle_debounce`, `reconcile_queue` and `stub_health` decide, and are tested without a server; `rsrv_gen` writes the repository; here the two
meet `loads`, which tells Triton. In the mode `dynamic` all of it happens, in `static` and `explicit` only the mending and `reload`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from rsrv.control.bundle_debounce import BundleDebounce, Seen
from rsrv.control.grpc_errors import Refused
from rsrv.control.loads import Loads
from rsrv.control.protocols import RuntimeView
from rsrv.control.reconcile_queue import Failure, ReconcileQueue
from rsrv.control.stub_health import AGREE, StubHealth
from rsrv.control.triton import HOW_TO_START, State, Triton, TritonError
from rsrv.control.watching import BundleSources, look, sign, watch
from rsrv.logs import fields
from rsrv.settings import Settings
from rsrv_gen.aside import version_of
from rsrv_gen.sources import SETTINGS_FILE
from rsrv_gen.update import Update, update
from rsrv_gen.write import being_written, carried, our_models

log = logging.getLogger("rsrv.control")

#: Seconds between attempts to reach a tritonserver that is loading its first models.
KNOCK = 0.5
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


class LifecycleError(Refused):
    """A model was not loaded anew."""


class Reconciler:
    """The models of one tritonserver. One event loop owns it."""

    def __init__(self, settings: Settings, repository: Path, view: RuntimeView, triton: Triton) -> None:
        self._settings = settings
        self._lifecycle = settings.lifecycle
        #: Bundles are looked at all the time, and not only when somebody asks.
        self._follows = settings.lifecycle.mode == "dynamic"
        self._repository = repository.absolute()
        self._view = view
        self._triton = triton
        self._sources = BundleSources(settings.lifecycle.bundles, self._repository / SETTINGS_FILE)
        self._debounce = BundleDebounce(settings.lifecycle.look_s)
        self._queue = ReconcileQueue()
        self._stub_health = StubHealth()
        #: Held by who writes the repository, and by who begins a load or an unload for another reason than a dead stub.
        self._writing = asyncio.Lock()
        #: Something is to be done, or may be.
        self._stir = asyncio.Event()
        self._loads = Loads(self._repository, self._lifecycle.link, triton, self._queue, self._stir)
        #: Who is to be unloaded because these metas carry it.
        self._carriers: dict[str, tuple[str, ...]] = {}
        self._unusable: set[str] = set()
        #: Models that somebody has unloaded by hand, as far as is known.
        self._dismissed: set[str] = set()
        #: Why nothing can be loaded or unloaded; empty: it can.
        self._barred = triton.trouble
        if not self._barred and triton.mode == "none":
            self._barred = f"tritonserver's models are fixed; {HOW_TO_START}"

    @property
    def failures(self) -> Mapping[str, Failure]:
        """Models that are not as their bundles say, and why. An older version of them may be serving."""
        return self._queue.failures

    @property
    def loading(self) -> Collection[str]:
        """Models that Triton is loading, or unloading."""
        return self._queue.busy

    @property
    def unwanted(self) -> Collection[str]:
        """Models of the repository that need not serve: unloaded by hand, or on their way out of it."""
        return self._dismissed | self._loads.unloading

    async def run(self) -> None:
        """Never returns."""
        await self._reach()
        if self._barred:
            log.warning("models can't be loaded, unloaded or mended: %s", self._barred)
        elif self._triton.exits_on_error and self._lifecycle.mode != "explicit":
            log.warning(
                "tritonserver was started without --exit-on-error=false: if it ends while a new version loads that "
                "fails, it will not start again"
            )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._again(self._mend), name="mend")
                group.create_task(self._again(self._tend), name="tend")
                if self._follows:
                    watching = partial(watch, self._sources.read, self._lifecycle, self._took)
                    group.create_task(self._again(watching), name="watch")
        finally:
            self._loads.cancel()

    async def reload(self, name: str) -> None:
        """Loads the model anew, from its bundle as it is now; returns when that version serves. Raises LifecycleError.

        Of a model that only metas carry, these are loaded anew.
        """
        if self._barred:
            raise LifecycleError("FAILED_PRECONDITION", f"{name} can't be loaded: {self._barred}")
        names = await asyncio.to_thread(self._stands_for, name)
        if not names and not self._follows:
            async with self._writing:
                await self._look_anew()
        # One that is new and not whole yet is waited for.
        if not names and self._debounce.settled(name) == ():
            raise LifecycleError("NOT_FOUND", f"there is no model '{name}' that rsrv-gen made, and no bundle")
        names = names or {name}
        await self._loads.wait(names)
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
        await self._loads.wait(names)
        for one in names & self.failures.keys():
            code = "FAILED_PRECONDITION" if one in (done.broken | done.torn) else "INTERNAL"
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
            await asyncio.sleep(KNOCK)

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
        before = self._debounce.agreed
        changed = self._look(seen)
        self._queue.changed(changed)
        if changed or self._debounce.agreed != before:
            self._stir.set()
        return self._debounce.restless

    def _look(self, seen: Mapping[Path, Seen]) -> Collection[str]:
        changed, told = self._debounce.look(seen, self._now())
        for line in told:
            log.warning("%s", line)
        return changed

    async def _look_anew(self) -> None:
        """Two looks, for when nobody looks all the time; one if it agrees with those before, three at most."""
        linked = self._lifecycle.link == "hard"
        for _ in range(3):
            self._look(await asyncio.to_thread(look, self._sources.read, linked=linked))
            if not self._debounce.restless:
                return
            await asyncio.sleep(self._lifecycle.look_s)

    async def _tend(self) -> None:
        """Does what is due."""
        if not self._barred:
            async with self._writing:
                await self._loads.take_over(decides=self._lifecycle.mode != "explicit")
        first, sightings = self._follows, 0
        while True:
            self._stir.clear()
            if self._follows and self._debounce.agreed and (first or sightings != self._debounce.sightings):
                # Whatever changed while nobody looked, or nobody could.
                sightings = self._debounce.sightings
                if first:
                    self._queue.due(self._now())
                await self._bring(None)
                first = False
            if not first:
                await self._do(self._queue.due(self._now()))
                await self._let_go()
            at = self._queue.next_time()
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which forgets that it was cancelled when something stirs at that moment.
                async with asyncio.timeout_at(at):
                    await self._stir.wait()

    async def _do(self, due: Collection[str]) -> None:
        # Where nobody follows the bundles, what failed to be mended is not given another one.
        mended = set() if self._follows else self._loads.mended & self.failures.keys() & set(due)
        for name in mended:
            self._replace(name)
        if rest := set(due) - mended:
            await self._bring(rest)

    async def _let_go(self) -> None:
        async with self._writing:
            for name in self._queue.leavers(self._now()):
                may_leave = await self._may_leave(name)
                if name in self._loads:
                    continue  # its stub was found dead at this moment
                if may_leave:
                    self._loads.unload(name)
                else:
                    self._queue.stay(name)
                    if self.failures.keys().isdisjoint(self._carriers.get(name, ())):
                        # Its bundle seems to be back, or who carries it is not there yet: nothing else may say so when
                        # that changes. A carrier that failed is tried again, and this one with it.
                        self._queue.later(name, self._now() + self._lifecycle.poll_s)

    async def _may_leave(self, name: str) -> bool:
        if carriers := self._carriers.get(name):
            return all(self._carries(meta, name) for meta in carriers)
        if not self._debounce.gone(name):
            return False
        # One whose bundle was never seen may come from a place that an rsrv-gen is about to name.
        return self._debounce.knew(name) or await asyncio.to_thread(self._all_places_seen)

    def _carries(self, meta: str, name: str) -> bool:
        """Whether a meta model serves that has this one with it."""
        loaded = meta in self._loads.served and meta not in self._loads and meta not in self.failures
        return loaded and name in carried(self._repository / meta)

    def _all_places_seen(self) -> bool:
        return not being_written(self._repository) and set(self._sources.read()) == set(self._debounce.roots)

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
            without = ours - alive - set(self._queue.busy)
            idle &= without
            self._dismissed &= without
            ready: set[str] = set()
            if without - idle and not self._triton.trouble:
                with contextlib.suppress(TritonError):
                    states = await self._triton.states()
                    ready = {name for name in without if states.get(name) == "ready"}
                    ready -= set(self._queue.busy)
                    idle = without - ready
                    self._dismissed = {name for name in without if states.get(name) == "dismissed"}
            up_since = self._view.since if self._view.up else None
            if dead := self._stub_health.look(ready, alive, up_since, self._now()):
                for name in dead - set(self._queue.busy):
                    self._replace(name)
            await asyncio.sleep(_BREATH)
            with contextlib.suppress(TimeoutError):
                wait = AGREE - _BREATH if self._stub_health.suspicious else self._lifecycle.poll_s
                async with asyncio.timeout(wait):
                    await self._view.wait_change(seen)

    def _replace(self, name: str) -> None:
        """Its stub is dead."""
        if self._barred:
            text = f"its stub process is dead, and it can't be loaded anew: {self._barred}"
            self._loads.fail(name, text, again=False)
        elif self._loads.mend(name):
            log.warning("%s: its stub process is dead; loading it anew", name, extra=fields(model=name))
        else:
            return
        self._stub_health.pardon(name, self._now() + _PARDON[self._triton.mode])

    # --- what is done ---------------------------------------------------------------------------------------------

    async def _bring(self, names: Collection[str] | None, *, anew: bool = False) -> Update:
        """Brings models (None: all) up to date in the repository; what was done.

        Files without checksums are read twice, and taken if they have not changed in between. The models' loads have begun
        when this returns. `anew`: also of those that are up to date.
        """
        async with self._writing:
            if not self._follows:
                await self._look_anew()
            try:
                done = await asyncio.to_thread(self._update, names, {})
                if unsure := done.unsure:
                    await asyncio.sleep(self._lifecycle.look_s)
                    done.join(await asyncio.to_thread(self._update, unsure.keys(), unsure))
                await self._follow_up(done, names, anew=anew)
            finally:
                self._loads.release()
        self._stir.set()
        return done

    async def _follow_up(self, done: Update, names: Collection[str] | None, *, anew: bool) -> None:
        """Begins the loads and unloads that what was done to the repository calls for."""
        self._report(done)
        if self._follows:
            # What broke them may be the disk's, and pass without a change that a look would see.
            again = {*done.broken, *done.hidden}
            for name in again if names is None else again & set(names):
                self._queue.later(name, self._now() + _BROKEN_PAUSE)
        if names is None:
            await self._spare_dismissed()
        for name, put in done.put.items():
            self._queue.stay(name)
            self._loads.load(name, put)
        for name in done.unchanged:
            self._queue.stay(name)
            folder = self._repository / name
            here = names is not None and name in names
            if name in self._loads:
                continue
            # What failed though nothing is to be written lost its stub, and still has none.
            wanted = (anew and here) or name in self._queue.failures
            if not self._barred and (wanted or self._loads.served.get(name) != version_of(folder)):
                self._loads.load(name, anew=names is not None)
            else:
                self._queue.done(name)
        for name, carriers in done.go.items():
            if self._barred:
                self._loads.fail(
                    name, f"its bundle is gone, and it can't be unloaded: {self._barred}", again=False
                )
            else:
                self._carriers[name] = carriers
                self._queue.leave(name)
        # Who asks for one that is being written, and is not followed, is told to ask again.
        for name in done.later if self._follows else done.later & self._queue.failures.keys():
            self._queue.later(name, self._now() + self._lifecycle.poll_s)
        # Of the rest there is neither a bundle nor a model.
        known = [
            done.put,
            done.unchanged,
            done.go,
            done.broken,
            done.failed,
            done.torn,
            done.later,
        ]
        if not self._follows:
            known.append(done.kept)  # nobody looks whether it is back
        for name in set(names or ()).difference(*known):
            if name in self._loads.served and not self._barred:
                # Another rsrv-gen has removed it.
                self._carriers.pop(name, None)
                self._queue.leave(name)
            else:
                self._queue.done(name)

    async def _spare_dismissed(self) -> None:
        """Whoever unloaded a model by hand meant it, until its bundle changes: it counts as served."""
        states: Mapping[str, State] = {}
        with contextlib.suppress(TritonError):
            states = await self._triton.states()
        for name in [name for name, state in states.items() if state == "dismissed"]:
            self._loads.served[name] = version_of(self._repository / name)

    def _update(self, names: Collection[str] | None, first: Mapping[str, str]) -> Update:
        """On a thread: brings the repository up to date. `first`: what a first reading of some of the models found."""
        return update(
            self._repository,
            self._sources.read(),
            names,
            link=self._lifecycle.link,
            transport=self._settings.meta.transport,
            stays=self._stays,
            ready=self._is_whole,
            take=self._loads.take,
            write=not self._barred,
            later_than=self._loads.stamps,
            first=first,
        )

    def _stays(self, name: str) -> str:
        return "" if self._follows and self._debounce.gone(name) else "its bundle is out of sight"

    def _is_whole(self, name: str) -> bool:
        """Whether the bundle is on disk as the looks agreed that it is."""
        found = self._debounce.settled(name) or ()
        linked = self._lifecycle.link == "hard"
        return bool(found) and all(sign(self._place(root, name), linked=linked) == was for root, was in found)

    def _place(self, root: Path, name: str) -> Path:
        return root if root.name == name and (root / "manifest.yaml").exists() else root / name

    def _report(self, done: Update) -> None:
        """Takes what could not be done."""
        for line in set(done.unusable) - self._unusable:
            log.warning("no bundles: %s", line)
        self._unusable = set(done.unusable)
        for name, failure in self._queue.broken(done.broken, time.time()).items():
            log.error("%s stays as it was: %s", name, failure.text, extra=fields(model=name))
        for name, text in done.torn.items():
            self._loads.fail(name, f"its bundle is not taken: {text}")
        for name, text in done.failed.items():
            self._loads.fail(
                name, f"{text}: {self._barred}" if self._barred else text, again=not self._barred
            )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
