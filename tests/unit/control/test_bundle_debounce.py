"""`BundleDebounce`: which differences between scans count as a change of a bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv.control.bundle_debounce import BundleDebounce, Seen
from rsrv_gen.signatures import Signature, signature

ROOT, OTHER = Path("/r"), Path("/s")
HERE, NEW = (1, 100), (2, 2)


def seen(identity: tuple[int, int] = HERE, **bundles: Signature) -> Seen:
    return Seen(identity, bundles)


def told(debounce: BundleDebounce, now: float, *roots: Seen) -> list[str]:
    return debounce.add_scan(dict(zip((ROOT, OTHER), roots, strict=False)), now)[1]


def changed(debounce: BundleDebounce, now: float, *roots: Seen) -> set[str]:
    return set(debounce.add_scan(dict(zip((ROOT, OTHER), roots, strict=False)), now)[0])


@pytest.fixture
def debounce() -> BundleDebounce:
    """Return a debounce that has seen `a` and `b` twice."""
    debounce = BundleDebounce(pause=1.0)
    assert changed(debounce, 0.0, seen(a="1", b="1")) == set()
    unsettled = [debounce.unsettled]
    assert changed(debounce, 1.0, seen(a="1", b="1")) == {"a", "b"}
    assert [*unsettled, debounce.unsettled] == [True, False]
    return debounce


def test_two_scans_have_to_agree(debounce: BundleDebounce) -> None:
    """A change is reported when two scans that are far enough apart agree. More scans in between do not matter."""
    assert changed(debounce, 2.0, seen(a="2", b="1")) == set()
    assert changed(debounce, 2.9, seen(a="2", b="1")) == set()
    assert changed(debounce, 3.0, seen(a="3", b="1")) == set()
    assert debounce.settled("a") is None
    assert changed(debounce, 3.9, seen(a="3", b="1")) == set()
    assert changed(debounce, 4.0, seen(a="3", b="1")) == {"a"}
    assert changed(debounce, 5.0, seen(a="3", b="1")) == set()
    assert debounce.settled("a") == ((ROOT, "3"),)


def test_a_root_that_appears_is_scanned_twice_before_anything_counts_as_gone() -> None:
    """Each time a root appears, two scans of it must agree before a missing bundle counts as gone."""
    debounce, nowhere = BundleDebounce(pause=1.0), Seen(None, trouble="does not exist")
    for now in (0.0, 1.0):
        changed(debounce, now, seen(a="1"), nowhere)
    assert (debounce.agreed, debounce.gone("x"), debounce.sightings) == (True, False, 1)
    changed(debounce, 2.0, seen(a="1"), seen(y="1"))
    assert (debounce.agreed, debounce.gone("x"), debounce.sightings) == (False, False, 2)
    changed(debounce, 3.0, seen(a="1"), seen(y="1"))
    assert (debounce.agreed, debounce.gone("x"), debounce.sightings) == (True, True, 2)
    changed(debounce, 4.0, seen(a="1"), nowhere)
    changed(debounce, 5.0, seen(a="1"), seen(y="1"))
    assert (debounce.agreed, debounce.sightings) == (False, 3)


def test_a_change_that_is_taken_back_was_none(debounce: BundleDebounce) -> None:
    """A change that is undone before the second scan is not reported."""
    assert changed(debounce, 2.0, seen(a="2")) == set()
    assert changed(debounce, 9.0, seen(a="1", b="1")) == set()
    assert not debounce.unsettled


def test_one_bundle_that_never_rests_holds_up_no_other(debounce: BundleDebounce) -> None:
    """Each bundle is judged by its own scans. A bundle that keeps changing, or is unreadable, does not delay other bundles."""
    counted = [changed(debounce, 2.0 + i, seen(a=str(i), b="2", c=None)) for i in range(5)]
    assert counted == [set(), {"b"}, set(), set(), set()]
    assert debounce.settled("c") is None
    assert not debounce.gone("c")


def test_a_removed_bundle_is_gone_when_two_scans_agree(debounce: BundleDebounce) -> None:
    """A removed bundle is gone when two scans agree, even if it was the last one of a directory."""
    assert changed(debounce, 2.0, seen()) == set()
    assert not debounce.gone("a")
    assert changed(debounce, 3.0, seen()) == {"a", "b"}
    assert debounce.gone("a")
    assert debounce.gone("never there")


def test_what_is_copied_without_its_manifest_is_not_gone(debounce: BundleDebounce) -> None:
    """A bundle without a manifest is not gone while its files change. It is gone when they no longer change."""
    assert [changed(debounce, 2.0 + i, seen(a=f"-{i}", b="1")) for i in range(4)] == 4 * [set()]
    assert not debounce.gone("a")
    assert debounce.unsettled
    assert changed(debounce, 6.0, seen(a="-3", b="1")) == {"a"}
    assert debounce.gone("a")
    assert [changed(debounce, 7.0 + i, seen(a="-4", b="1")) for i in range(2)] == 2 * [set()]
    assert not debounce.unsettled


def test_a_directory_without_a_manifest_never_was_a_bundle(debounce: BundleDebounce) -> None:
    """A directory without a manifest is never reported. A root that has only such directories may be an unmounted disk."""
    for now in (2.0, 3.0):
        assert changed(debounce, now, seen(a="1", b="1", other="-1")) == set()
    assert not debounce.was_known("other")
    (line,) = told(debounce, 4.0, seen(NEW, other="-1"))
    assert "If a disk is not mounted, mount it." in line


@pytest.mark.parametrize(
    "missing",
    [Seen(None, trouble="does not exist"), seen(NEW)],
    ids=["no directory", "what a disk is mounted on"],
)
def test_nothing_is_gone_with_a_missing_root(debounce: BundleDebounce, missing: Seen) -> None:
    """While a root is missing, its bundles are not gone.

    The loss and the return of the root are reported once each. After the return, changed bundles are reported.
    """
    (line,) = told(debounce, 2.0, missing)
    assert "If a disk is not mounted, mount it." in line
    assert told(debounce, 10.0, missing) == []
    assert changed(debounce, 20.0, missing) == set()
    assert not debounce.gone("a")
    (line,) = told(debounce, 30.0, seen(NEW, a="1", c="1"))
    assert "can be read again" in line
    assert changed(debounce, 31.0, seen(NEW, a="1", c="1")) == {"b", "c"}
    assert debounce.gone("b")


def test_a_root_that_was_never_there_may_hold_anything() -> None:
    """While a root was never seen, a bundle is gone only if its name was seen below another root."""
    debounce, away = BundleDebounce(pause=1.0), Seen(None, trouble="does not exist")
    assert not debounce.gone("x")
    for now in (0.0, 1.0):
        changed(debounce, now, seen(a="1"), away)
    assert not debounce.gone("x")
    for now in (2.0, 3.0):
        changed(debounce, now, seen(HERE), away)
    assert debounce.gone("a")
    assert not debounce.gone("x")


def test_another_directory_with_bundles_is_taken_as_it_is(debounce: BundleDebounce) -> None:
    """If a root becomes another directory with bundles, for example because a link changes, only these bundles count.

    Bundles that only the old directory has are gone.
    """
    changed(debounce, 2.0, seen(NEW, a="1", c="1"))
    assert changed(debounce, 3.0, seen(NEW, a="1", c="1")) == {"b", "c"}
    assert debounce.gone("b")


def test_a_name_below_two_roots_is_two_bundles(debounce: BundleDebounce) -> None:
    """If a name is below two roots, there are two bundles. When one of them goes, the other one remains."""
    for now in (2.0, 3.0):
        changed(debounce, now, seen(a="1", b="1"), seen(a="7"))
    assert debounce.settled("a") == ((ROOT, "1"), (OTHER, "7"))
    for now in (4.0, 5.0):
        changed(debounce, now, seen(b="1"), seen(a="7"))
    assert debounce.settled("a") == ((OTHER, "7"),)


def test_a_signature_is_of_every_file_in_any_order() -> None:
    """A signature depends on names, sizes, times and inodes of all files, but not on their order."""
    files = [("a", 1, 2, 3, 4), ("b/c", 1, 2, 3, 5)]
    same = signature(files)
    assert signature(reversed(files)) == same
    for index in range(5):
        other = [*files[0]]
        other[index] = "z" if index == 0 else 9
        assert signature([tuple(other), files[1]]) != same  # type: ignore[list-item]
