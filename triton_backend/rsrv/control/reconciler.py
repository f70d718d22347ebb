"""Makes Triton serve the current bundles, replaces dead stubs, and loads a model again when an operator asks.

`bundle_debounce` decides when to accept a change on disk. `bundle_states` decides what to do for each bundle, and when.
`stub_monitor` finds dead stubs. `rsrv_gen` writes the repository, and `model_loader` makes Triton load and unload models. All of
this happens in the mode `dynamic`. In the modes `static` and `explicit`, only dead stubs are replaced, and models are loaded again
on request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rsrv.control.bundle_debounce import BundleDebounce, Seen
from rsrv.control.bundle_states import BundleEvent, BundleFailure, BundleState, BundleStates
from rsrv.control.grpc_service import StatusError
from rsrv.control.model_loader import ModelLoader
from rsrv.control.runtimes import Runtimes
from rsrv.control.stub_monitor import StubMonitor
from rsrv.control.triton import HOW_TO_START, State, Triton, TritonError
from rsrv.control.watching import BundleSources, scan_all, watch
from rsrv.logs import fields
from rsrv.settings import LifecycleSection, Settings, Shares
from rsrv_gen.known import Known
from rsrv_gen.signatures import sign
from rsrv_gen.sources import SETTINGS_FILE, unknown_models
from rsrv_gen.staging import version_of
from rsrv_gen.update import (
    Broken,
    Failed,
    Gone,
    Later,
    RepositorySettings,
    RepositoryUpdate,
    Retained,
    Torn,
    Unchanged,
    Unsure,
    Update,
    UpdatePolicy,
    Written,
)
from rsrv_gen.write import being_written, carried, is_alias, our_models

log = logging.getLogger(__name__)

#: Seconds between attempts to reach a tritonserver that is loading its first models.
STARTUP_POLL_S = 0.5
#: If a starting tritonserver has not answered for this many seconds, the log has a warning.
_STARTUP_WARNING_S = 120.0
#: Seconds until a broken bundle is read again even if it seems unchanged, because the disk may have been the cause.
_BROKEN_CHECK_S = 60.0
#: Seconds between an unexpected error and the next attempt.
_ERROR_PAUSE_S = 5.0


class ReloadError(StatusError):
    """A model was not loaded again."""


class ServerPolicy(UpdatePolicy):
    """Decides for a running server which models an update of its repository may change. Called on a thread."""

    def __init__(
        self, debounce: BundleDebounce, loader: ModelLoader, lifecycle: LifecycleSection, *, may_write: bool
    ) -> None:
        self._debounce = debounce
        self._loader = loader
        self._follows = lifecycle.mode == "dynamic"
        self._linked = lifecycle.link == "hard"
        self.may_write = may_write

    def reason_to_keep(self, name: str) -> str:
        return (
            "" if self._follows and self._debounce.gone(name) else "its bundle was not found, but may return"
        )

    def is_readable(self, name: str) -> bool:
        """Return True if the bundle on disk has not changed since two scans of it agreed."""
        paths = self._debounce.settled(name) or ()
        return bool(paths) and all(
            sign(_place(root, name), linked=self._linked) == signature for root, signature in paths
        )

    def reserve(self, name: str) -> bool:
        return self._loader.reserve(name)

    def newer_than(self, name: str) -> int:
        return self._loader.stamps.get(name, 0)


def _place(root: Path, name: str) -> Path:
    """Return a bundle's directory in a root. The root may be the bundle itself."""
    return root if root.name == name and (root / "manifest.yaml").exists() else root / name


class Reconciler:
    """The models of one tritonserver. One event loop owns it."""

    def __init__(
        self,
        settings: Settings,
        repository: Path,
        view: Runtimes,
        triton: Triton,
        processes: Callable[[], Collection[str]],
    ) -> None:
        """`processes` returns the models that have a live stub process. It is called on a thread."""
        self._settings = settings
        self._lifecycle = settings.lifecycle
        #: Aliases that should be served, with their shares.
        self.aliases: Mapping[str, Shares] = settings.aliases
        #: True if the reconciler follows changes of bundles. Otherwise, it reads bundles only when an operator asks for a reload.
        self._follows = settings.lifecycle.mode == "dynamic"
        self._repository = repository.absolute()
        self._triton = triton
        self._known = Known(self._repository, linked=settings.lifecycle.link == "hard")
        self._sources = BundleSources(settings.lifecycle.bundles, self._repository / SETTINGS_FILE)
        self._debounce = BundleDebounce(settings.lifecycle.poll_s)
        self._states = BundleStates()
        #: Held while the repository is written, and while loads and unloads begin, except loads that replace dead stubs.
        self._writing = asyncio.Lock()
        #: Set when there may be something to do.
        self._wake = asyncio.Event()
        self._loader = ModelLoader(self._repository, self._lifecycle.link, triton, self._states, self._wake)
        self._stubs = StubMonitor(
            self._repository, view, triton, self._states, self._lifecycle.slow_poll_s, processes
        )
        #: True once Triton has loaded its first models, or cannot be reached.
        self.reached = False
        #: Number of times that a model's stub was found dead, by model.
        self.process_ends: Counter[str] = Counter()
        #: Warnings about places without bundles that are in the log.
        self._unusable: set[str] = set()
        #: Warnings about settings of models without a bundle that are in the log.
        self._unknown: set[str] = set()
        #: Reason why Triton cannot load or unload models, with the remedy. Empty if it can.
        self.barred = triton.trouble
        if not self.barred and triton.mode == "none":
            self.barred = f"this tritonserver cannot load or unload models while it runs; {HOW_TO_START}"
        self._policy = ServerPolicy(self._debounce, self._loader, self._lifecycle, may_write=not self.barred)

    @property
    def failures(self) -> Mapping[str, BundleFailure]:
        """Why models and aliases differ from their bundles and settings, by name. An older version may be serving."""
        return self._states.failures

    @property
    def reasons(self) -> dict[str, str]:
        """The texts of `failures`."""
        return {name: failure.text for name, failure in self.failures.items()}

    def bundle_state(self, name: str) -> str:
        """Return the name of the state of a model's bundle."""
        return self._states.state(name).value

    @property
    def loading(self) -> Collection[str]:
        """Models that Triton is loading or unloading."""
        return self._states.busy

    @property
    def load_threads(self) -> int:
        """Number of models that Triton loads at a time."""
        return self._triton.load_threads

    @property
    def unwanted(self) -> Collection[str]:
        """Models of the repository that need not serve: an operator has unloaded them, or they are being removed."""
        return self._stubs.dismissed | self._states.unloading

    async def run(self) -> None:
        """Reconcile until cancelled."""
        await self._reach()
        self.reached = True
        if self.barred:
            log.warning(
                "models cannot be loaded or unloaded, and dead stub processes are not replaced: %s",
                self.barred,
            )
        elif self._triton.exits_on_error and self._lifecycle.mode != "explicit":
            log.warning(
                "tritonserver was started without --exit-on-error=false: if it ends while it loads a broken new version, "
                "it will not start again"
            )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forever(self._replace_dead), name="replace dead stubs")
                group.create_task(self._forever(self._reconcile), name="reconcile")
                if self._follows:
                    watching = partial(watch, self._sources.read, self._lifecycle, self._on_scan)
                    group.create_task(self._forever(watching), name="watch")
        finally:
            self._loader.cancel()

    def follow_aliases(self, aliases: Mapping[str, Shares]) -> None:
        """Make the reconciler serve these aliases instead of the earlier ones."""
        before, self.aliases = self.aliases, aliases
        changed = {name for name in {*before, *aliases} if before.get(name) != aliases.get(name)}
        if changed:
            self._states.changed(changed, self._now())
            self._wake.set()

    async def change_alias(self, name: str, shares: Shares | None) -> None:
        """Serve an alias with these shares, or stop serving it if `shares` is None. Return when that is done.

        After a ReloadError, nothing has changed.
        """
        if self.barred:
            raise ReloadError("FAILED_PRECONDITION", f"{name} cannot be changed: {self.barred}")
        before = self.aliases
        others = {alias: targets for alias, targets in before.items() if alias != name}
        self.aliases = others if shares is None else {**others, name: shares}
        await self._loader.wait({name})
        done = await self._update({name})
        await self._loader.wait({name})
        failure = self.failures.get(name)
        broken = done.of(Broken)
        refused = broken.get(name) or broken.get(f"aliases.{name}")
        text = refused.reason if refused else failure and failure.text
        if not text and name in done.of(Later):
            text = "a bundle that the alias needs is being written; try again when it is complete"
        if text:
            self.follow_aliases(before)
            raise ReloadError("FAILED_PRECONDITION", f"{name}: {text}")

    async def reload(self, name: str) -> None:
        """Load the model again from its current bundle. Return when that version serves. Raises ReloadError.

        If the model is only a part of meta models, load these meta models again.
        """
        if self.barred:
            raise ReloadError("FAILED_PRECONDITION", f"{name} cannot be loaded: {self.barred}")
        names = await asyncio.to_thread(self._models_of, name)
        if not names and not self._follows:
            async with self._writing:
                await self._scan_now()
        # Report NOT_FOUND only if the scans agree that there is no bundle. Otherwise, a new bundle may be complete soon.
        if not names and self._debounce.settled(name) == ():
            raise ReloadError(
                "NOT_FOUND", f"there is no model '{name}' that rsrv-gen made, and no bundle of this name"
            )
        names = names or {name}
        await self._loader.wait(names)
        done = await self._update(names, reload=True)
        if not names.isdisjoint(done.of(Later)):
            raise ReloadError(
                "UNAVAILABLE", f"the bundle of {name} is being written; try again when it is complete"
            )
        without = {name for name, result in done.of(Gone).items() if not result.carriers}
        for name_of_model in names & (without | done.names(Retained)):
            raise ReloadError(
                "FAILED_PRECONDITION",
                f"{name_of_model}: there is no bundle, or its directory is not mounted; the model was not changed",
            )
        broken = done.of(Broken)
        for name_of_model in names & broken.keys():
            raise ReloadError("FAILED_PRECONDITION", f"{name_of_model}: {broken[name_of_model].reason}")
        await self._loader.wait(names)
        for name_of_model in names & self.failures.keys():
            code = "FAILED_PRECONDITION" if name_of_model in done.of(Torn) else "INTERNAL"
            raise ReloadError(code, f"{name_of_model} failed: {self.failures[name_of_model].text}")

    def _models_of(self, name: str) -> set[str]:
        """Return the models of the repository for a name: the model itself, or else the meta models that it is a part of."""
        ours = our_models(self._repository)
        return {name} & ours or {meta for meta in ours if name in carried(self._repository / meta)}

    # --- tasks ------------------------------------------------------------------------------------------------

    async def _reach(self) -> None:
        """Wait until Triton answers, which it does once its first models are loaded."""
        silent_since: float | None = self._now()
        while not self._triton.trouble:
            try:
                await self._triton.states()
                return
            except TritonError as error:
                if silent_since is not None and self._now() - silent_since > _STARTUP_WARNING_S:
                    log.warning("tritonserver does not answer at %s yet: %s", self._triton.address, error)
                    silent_since = None
            await asyncio.sleep(STARTUP_POLL_S)

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat the work forever. An unexpected error is logged, because it must not end the other tasks."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("unexpected error; the control process continues in %g s", _ERROR_PAUSE_S)
                await asyncio.sleep(_ERROR_PAUSE_S)

    def _on_scan(self, seen: Mapping[Path, Seen]) -> bool:
        """Evaluate a scan of the bundles. Return True if another scan should follow soon."""
        before = self._debounce.agreed
        changed = self._add_scan(seen)
        self._states.changed(changed, self._now())
        if changed or self._debounce.agreed != before:
            self._wake.set()
        return self._debounce.unsettled

    def _add_scan(self, seen: Mapping[Path, Seen]) -> Collection[str]:
        changed, lines = self._debounce.add_scan(seen, self._now())
        for line in lines:
            log.warning("%s", line)
        return changed

    async def _scan_now(self) -> None:
        """Scan the bundles until two scans agree, at most three times. For modes that do not follow bundles."""
        linked = self._lifecycle.link == "hard"
        for _ in range(3):
            self._add_scan(await asyncio.to_thread(scan_all, self._sources.read, linked=linked))
            if not self._debounce.unsettled:
                return
            await asyncio.sleep(self._lifecycle.poll_s)

    async def _reconcile(self) -> None:
        """Carry out the actions that are due, and wait for the next event or time."""
        if not self.barred:
            async with self._writing:
                await self._loader.resume(load_unknown=self._lifecycle.mode != "explicit")
        first, sightings = self._follows, 0
        while True:
            self._wake.clear()
            if self._follows and self._debounce.agreed and (first or sightings != self._debounce.sightings):
                # Compare all bundles, because some may have changed before the control process started or while a root was
                # missing.
                sightings = self._debounce.sightings
                if first:
                    self._states.due(self._now())
                await self._update(None)
                first = False
            at = None
            if not first:
                await self._do(self._states.due(self._now()))
                await self._unload_pending()
                at = self._states.next_time(self._now())
            with contextlib.suppress(TimeoutError):
                # Do not use wait_for, which loses a cancellation that comes at the same time as the event.
                async with asyncio.timeout_at(at):
                    await self._wake.wait()

    async def _do(self, due: Collection[str]) -> None:
        stubs_only = set()
        if not self._follows:
            # In this mode, do not load changed bundles. Retry only reloads, which load the version that served before.
            stubs_only = {name for name in due if self._states.state(name) is BundleState.RELOAD_FAILED}
        for name in stubs_only:
            self._replace(name)
        if remaining := set(due) - stubs_only:
            await self._update(remaining)

    async def _unload_pending(self) -> None:
        async with self._writing:
            for name in self._states.unloadable(self._now()):
                may_unload = await self._may_unload(name)
                if self._states.state(name) is not BundleState.UNLOAD_PENDING:
                    continue  # Its stub was found dead in the meantime.
                if may_unload:
                    self._loader.unload(name)
                    continue
                carriers = self._states.carriers(name)
                self._states.retain(name, self._now())
                if self.failures.keys().isdisjoint(carriers):
                    # Check the model again later: its bundle seems to be back, or a meta model that contains it does not serve
                    # yet, and there may be no event when that changes. If such a meta model has failed, its retry also
                    # checks this model.
                    self._states.check(name, self._now() + self._lifecycle.slow_poll_s)

    async def _may_unload(self, name: str) -> bool:
        if carriers := self._states.carriers(name):
            return all(
                self._states.state(meta) is BundleState.SERVED and name in carried(self._repository / meta)
                for meta in carriers
            )
        if is_alias(self._repository / name):
            return name not in self.aliases
        if not self._debounce.gone(name):
            return False
        # If the bundle was never seen, it may be in a place that a running rsrv-gen has not recorded yet.
        return self._debounce.was_known(name) or await asyncio.to_thread(self._all_places_seen)

    def _all_places_seen(self) -> bool:
        return not being_written(self._repository) and set(self._sources.read()) == set(self._debounce.roots)

    async def _replace_dead(self) -> None:
        async with contextlib.aclosing(self._stubs.dead()) as dead:
            async for name in dead:
                self._replace(name)

    def _replace(self, name: str) -> None:
        """Replace the dead stub of a model."""
        if self.barred:
            text = f"its stub process is dead, and the model cannot be loaded again: {self.barred}"
            self._loader.fail(name, text, retry=False)
        elif self._loader.reload(name):
            log.warning(
                "%s: its stub process is dead; loading the model again", name, extra=fields(model=name)
            )
        else:
            return
        self.process_ends[name] += 1
        self._stubs.expect_start(name)

    # --- updates of the repository ----------------------------------------------------------------------------

    async def _update(self, names: Collection[str] | None, *, reload: bool = False) -> Update:
        """Bring models (None: all) up to date in the repository, and begin their loads.

        Files without checksums are read twice, and used if both reads agree. If `reload` is True, the named models are loaded
        even if they are up to date.
        """
        async with self._writing:
            if not self._follows:
                await self._scan_now()
            try:
                work = self._repository_update()
                done = await asyncio.to_thread(work.write, names, twice=True)
                if done.of(Unsure):
                    await asyncio.sleep(self._lifecycle.poll_s)
                    await asyncio.to_thread(work.confirm, done)
                await self._follow_up(done, names, reload=reload)
            finally:
                self._loader.release()
        self._wake.set()
        return done

    async def _follow_up(self, done: Update, names: Collection[str] | None, *, reload: bool) -> None:
        """Apply the outcome of each model to its state. This may begin a load or an unload."""
        now, named = self._now(), set(names or ())
        self._report(done, now)
        if names is None:
            await self._learn_served()
        for name, written in done.of(Written).items():
            self._loader.load(name, written.replaced)
        for name in done.of(Unchanged):
            self._follow_unchanged(name, expected=reload and name in named, named=names is not None)
        for name, result in done.of(Gone).items():
            if self.barred:
                text = f"its bundle or alias was removed, and the model cannot be unloaded: {self.barred}"
                self._loader.fail(name, text, retry=False)
            else:
                self._states.orphan(name, result.carriers, now)
        # Check bundles again later that are still being written. In modes that do not follow bundles, an error asks the
        # operator to try again.
        for name in done.of(Later):
            if self._follows or name in self.failures:
                self._states.check(name, now + self._lifecycle.slow_poll_s)
        # In modes that do not follow bundles, no later scan reads the bundle of a retained model, so handle the model here.
        followed_up = done.results.keys() - (done.names(Retained) if self._follows else set())
        for name in named - followed_up:
            # The update has found neither a bundle nor a model in the repository. Either another rsrv-gen has removed the
            # model, or it never served, and Triton still knows that its load failed.
            loaded = name in self._loader.served or self._states.state(name) is BundleState.UNLOAD_PENDING
            if (loaded or name in self.failures) and not self.barred:
                self._states.orphan(name, (), now)
            else:
                self._states.forget(name, now)
                if self._follows and not self._debounce.gone(name):
                    # The root was missing so briefly that no scan noticed it. So no scan will notice that it is back, either.
                    self._states.check(name, now + self._lifecycle.slow_poll_s)

    def _follow_unchanged(self, name: str, *, expected: bool, named: bool) -> None:
        """Load a model that equals its bundle if it is `expected`, has failed, or is not served.

        `named` is False if the update was for all models.
        """
        now = self._now()
        if name in self._states.busy:
            self._states.retain(name, now)
            return
        # A model that has failed although it equals its bundle has lost its stub.
        expected = expected or name in self.failures
        loaded = self._loader.served.get(name) == version_of(self._repository / name)
        if not self.barred and (expected or not loaded):
            self._loader.load(name, unchanged=named)
        else:
            self._states.conclude(name, BundleEvent.MATCHED, now)

    async def _learn_served(self) -> None:
        """Record which models Triton loaded when it started, and which models an operator has unloaded.

        The reconciler does not load these models until their bundles change.
        """
        states: Mapping[str, State] = {}
        with contextlib.suppress(TritonError):
            states = await self._triton.states()
        for name, state in states.items():
            version = version_of(self._repository / name)
            # Do not load models again that Triton loaded when it started: thousands of loads that change nothing would keep
            # Triton busy for minutes.
            at_start = version is not None and version[1] < self._triton.started_ns
            if state == "dismissed" or (state == "ready" and at_start):
                self._loader.served[name] = version

    def _repository_update(self) -> RepositoryUpdate:
        repository_settings = replace(
            RepositorySettings.of(self._settings, self._triton.program), aliases=self.aliases
        )
        return RepositoryUpdate(
            self._repository, self._sources.read(), repository_settings, self._policy, self._known
        )

    def _report(self, done: Update, now: float) -> None:
        """Record and log the failures."""
        for line in set(done.unusable) - self._unusable:
            log.warning("no bundles are read from %s", line)
        self._unusable = set(done.unusable)
        unknown = set(unknown_models(self._settings, done.bundles | done.names(Retained)))
        for line in unknown - self._unknown:
            log.warning("%s: %s", SETTINGS_FILE, line)
        self._unknown = unknown
        reasons = {name: result.reason for name, result in done.of(Broken).items()}
        broken = self._states.set_broken(reasons, now, time.time(), done.uncompared)
        for name, failure in broken.items():
            log.error("%s was not changed: %s", name, failure.text, extra=fields(model=name))
        for name, torn in done.of(Torn).items():
            self._loader.fail(name, f"its bundle is not used: {torn.reason}")
        for name, failed in done.of(Failed).items():
            text = f"{failed.reason}: {self.barred}" if self.barred else failed.reason
            self._loader.fail(name, text, retry=not self.barred)
        if self._follows:
            for name in reasons:
                # While Triton is loading or unloading the model, the model's state does not show that the bundle is broken. In
                # this case, compare the bundle again right after the load or unload.
                busy = self._states.state(name) in (BundleState.LOADING, BundleState.UNLOADING)
                self._states.check(name, now if busy else now + _BROKEN_CHECK_S)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
