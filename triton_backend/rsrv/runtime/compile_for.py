"""`python -m rsrv.runtime.compile_for REPOSITORY CARD`: compile the models of a repository for a card.

CARD is a name of `rsrv.cards`, or a profile that `rsrv gpu profile` wrote. rsrv-gen starts this program with the interpreter of
the runtime. It needs no GPU. The executables are written to REPOSITORY/CARD.executables. Valid executables of an earlier run
are kept. Exit status 1: a module could not be compiled, so the runtime will compile it.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rsrv.cards import CARDS, ProfileError, read_profile
from rsrv.command import put
from rsrv.runtime.device import DeviceError, Hardware
from rsrv.runtime.jax_compiler import LIBRARY_PRODUCTS, AheadCompiler
from rsrv.runtime.jax_environment import XlaFlagsError, check_xla_flags, drop_jax_variables
from rsrv.runtime.models import modules_of
from rsrv.runtime.numerics import probes
from rsrv.runtime.stored_executables import (
    SUFFIX,
    CompileTarget,
    StoredExecutables,
    StoredExecutablesError,
    write_executables,
)
from rsrv.settings import Settings, SettingsError, read_settings
from rsrv_bundle import BundleError
from rsrv_bundle.inspection import Inspector, InspectorError
from rsrv_bundle.modules import Signature

#: Outcomes of a module, as the report names them.
_COMPILED, _NOT_TUNED, _KEPT, _LEFT = (
    "compiled",
    "of them not tuned, because the profile lacks them",
    "kept",
    "left to the server",
)
_NO_ENGINE = "cuDNN executes their convolutions only with kernels tuned on a card. Run `rsrv gpu profile` on such a card"
#: Variant and batch size, the module in the form that is compiled, and its signature.
Module = tuple[tuple[int, int], bytes, Signature]
#: Name of the group of modules that `runtime.numerics` is probed with. Other groups have the name of their model.
PROBE = "the probe of runtime.numerics"
_UNTUNED = (
    "only the name of the card is known, so no kernel is tuned: cuBLAS and cuDNN choose kernels by rules of thumb, and "
    "XLA does not compare its own kernels. To tune them, run `rsrv gpu profile` on such a card"
)


@dataclass(frozen=True, slots=True)
class _Order:
    """A card to compile for, and the options of the compilation."""

    name: str
    #: Text of XLA's GpuTargetConfigProto.
    target: str
    #: Flags of XLA that apply the profile's tuning, or None without a profile.
    options: Mapping[str, Any] | None
    note: str

    @property
    def tuned(self) -> bool:
        return self.options is not None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rsrv.runtime.compile_for", description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("card")
    options = parser.parse_args(argv)
    # Drop the same variables as the runtime, which executes the results.
    drop_jax_variables(os.environ)
    try:
        check_xla_flags(os.environ)
        settings = settings_of(options.repository)
        with tempfile.TemporaryDirectory() as scratch:
            return _compile(options.repository, _card(options.card, Path(scratch)), settings)
    except (DeviceError, ProfileError, SettingsError, XlaFlagsError) as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        _complain("interrupted; run rsrv-gen again to compile the remaining modules")
        return 130


def settings_of(repository: Path) -> Settings:
    """Return the settings that rsrv-gen wrote beside the models. Raises SettingsError."""
    return read_settings(repository / "rsrv.yaml", remedy="Name a repository that rsrv-gen wrote")


def _card(name: str, scratch: Path) -> _Order:
    """Return the card with this name, or the card of the profile in this file. Raises ProfileError."""
    if (card := CARDS.get(name)) is not None:
        return _Order(name, card.target(), None, _UNTUNED)
    profile = read_profile(Path(name))
    # By this suffix, XLA knows that the file is text.
    tuning = scratch / "tuning.textproto"
    tuning.write_text(profile.tuning, encoding="utf-8")
    options = {"xla_gpu_load_autotune_results_from": str(tuning)}
    note = f"{profile.kernels} kernels were tuned with {profile.versions}"
    return _Order(Path(name).stem, profile.target, options, note)


def _compile(repository: Path, card: _Order, settings: Settings) -> int:
    compiler = AheadCompiler(card.target)
    target = compiler.target()
    path = repository / f"{card.name}{SUFFIX}"
    # With a profile, do not reuse executables of an earlier run: they may have been tuned with another profile.
    earlier = None if card.tuned else _earlier(path, target)
    work = _CardModules(compiler, card, settings.runtime.numerics != "f32", earlier)
    models: dict[str, dict[str, str]] = {}
    failed, finished = 0, False
    put(f"compiling for {target.card} ({target.versions}): {card.note}")
    try:
        for model, modules in models_of(repository, settings, compiler.hardware):
            started, counts = time.perf_counter(), Counter[str]()
            try:
                for key, module, signature in modules:
                    digest = hashlib.sha256(module).hexdigest()
                    if model != PROBE:
                        models.setdefault(model, {})["{}/{}".format(*key)] = digest
                    # Compile each module once: several meta models may call the same model, and several models may have the
                    # same module.
                    if digest not in work.entries and digest not in work.left:
                        counts[work.do(digest, module, signature)] += 1
            except (BundleError, InspectorError, RuntimeError, ValueError) as error:
                failed += 1
                _complain(f"{model}: {error}")
            else:
                if counts:
                    compiled, took = counts[_COMPILED] + counts[_NOT_TUNED], time.perf_counter() - started
                    further = "".join(
                        f", {counts[outcome]} {outcome}" for outcome in (_NOT_TUNED, _LEFT) if counts[outcome]
                    )
                    put(
                        f"compiled   {model}: {compiled} modules in {took:.1f} s, {counts[_KEPT]} kept{further}"
                    )
        finished = True
    finally:
        if earlier is not None:
            if not finished:
                # Keep the executables of models that were not reached, for the next run.
                for digest in earlier.contents.digests.keys() - work.entries.keys():
                    if (entry := earlier.get(digest)) is not None:
                        work.entries[digest] = entry
                work.left |= set(earlier.contents.left) - work.entries.keys()
                work.seconds = {**earlier.contents.seconds, **work.seconds}
                models = {**{name: dict(sizes) for name, sizes in earlier.contents.models.items()}, **models}
            earlier.close()
        if work.entries or work.left:
            write_executables(path, target, card.tuned, work.entries, work.seconds, models, sorted(work.left))
            put(f"wrote      {path}: {len(work.entries)} executables, {path.stat().st_size / 1e6:.1f} MB")
        if work.left:
            put(
                f"{len(work.left)} modules are left to the server, which compiles them when it starts: {_NO_ENGINE}"
            )
    return int(failed > 0)


class _CardModules:
    """Modules that were compiled for a card so far, by digest."""

    def __init__(
        self, compiler: AheadCompiler, card: _Order, tf32: bool, earlier: StoredExecutables | None
    ) -> None:
        """`tf32`: True if products may use TF32. `earlier`: valid executables of an earlier run, or None."""
        self._compiler = compiler
        self._card = card
        self._tf32 = tf32
        self._earlier = earlier
        self._rates = next((card for card in CARDS.values() if card.kind == compiler.target().card), None)
        self.entries: dict[str, bytes] = {}
        # See the fields of the same names in `Contents`.
        self.left: set[str] = set()
        self.seconds: dict[str, float] = {}

    def do(self, digest: str, module: bytes, signature: Signature) -> str:
        """Compile a module, unless the earlier run did. Return the outcome."""
        if self._earlier is not None:
            known = self._earlier.contents
            if digest in known.seconds:
                self.seconds[digest] = known.seconds[digest]
            if digest in known.left:
                self.left.add(digest)
                return _LEFT
            if (entry := self._earlier.get(digest)) is not None:
                self.entries[digest] = entry
                return _KEPT
        began = time.perf_counter()
        executable, complete = _compiled(self._compiler, self._card, module, signature)
        took = time.perf_counter() - began
        if self._rates is not None:
            # jaxlib's analysis is private. If another version lacks it, there is no estimate.
            with suppress(Exception):
                figures = self._compiler.work(module, signature, executable)
                self.seconds[digest] = self._rates.seconds(*figures, tf32=self._tf32)
        if self._compiler.lacks_engine(executable):
            self.left.add(digest)
            return _LEFT
        self.entries[digest] = self._compiler.entry(executable, took)
        return _COMPILED if complete or not self._card.tuned else _NOT_TUNED


def _compiled(compiler: AheadCompiler, card: _Order, module: bytes, signature: Signature) -> tuple[Any, bool]:
    """Compile a module. Return the executable, and whether all its kernels were tuned."""
    if card.options is not None:
        complete = {**card.options, "xla_gpu_require_complete_aot_autotune_results": True}
        # This fails if XLA has no tuning for one of the kernels, or cannot read the tuning. Any other error occurs again in
        # the compilation below.
        with suppress(RuntimeError):
            return compiler.compile(module, signature, complete), True
    return compiler.compile(module, signature, LIBRARY_PRODUCTS), False


def models_of(
    repository: Path, settings: Settings, hardware: Hardware
) -> Iterator[tuple[str, Iterator[Module]]]:
    """Yield the name of each model of a repository, with the modules that the runtime compiles on this hardware."""
    yield PROBE, (((0, index), *probe) for index, probe in enumerate(probes(settings.runtime.numerics)))
    inspector = Inspector()
    try:
        for folder in sorted((*repository.glob("*/1/bundle"), *repository.glob("*/1/calls/*"))):
            of_callee = folder.parent.name == "calls"
            name = folder.name if of_callee else folder.parent.parent.name
            yield name, modules_of(folder, settings, name, hardware, inspector)
    finally:
        inspector.close()


def _earlier(path: Path, target: CompileTarget) -> StoredExecutables | None:
    """Return the executables of an earlier run, or None if they are for another target, tuned, or damaged."""
    try:
        stored = StoredExecutables(path)
    except StoredExecutablesError:
        return None
    if not stored.contents.target.differences(target) and not stored.contents.tuned:
        return stored
    stored.close()
    return None


def _complain(text: str) -> None:
    put(f"rsrv-gen: {text}", sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
