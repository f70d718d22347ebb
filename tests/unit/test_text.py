"""Figures with their units, and hints about unknown words."""

import shutil
from pathlib import Path

import pytest

from rsrv.text import amount, by_number, duration, naming, nearest, os_error, percent, rate


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (2**40, "1.1 TB"),
        (10**18, "1e+03 PB"),
    ],
)
def test_bytes_have_three_digits_in_steps_of_1000(nbytes: int | None, text: str) -> None:
    """Numbers of bytes are shown with three digits, and with units in steps of 1000, never of 1024."""
    assert amount(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, "-"), (0, "0 s"), (2e-6, "2 µs"), (0.25, "250 ms"), (59, "59 s"), (90, "1.5 min")),
        (5400, "1.5 h"),
        *(
            (0.9994, "999 ms"),
            (0.9997, "1 s"),
            (0.0009994, "999 µs"),
            (0.0009997, "1 ms"),
            (9.997e-7, "1 µs"),
        ),
        *((59.94, "59.9 s"), (59.99, "1.0 min"), (3596, "59.9 min"), (3598, "1.0 h")),
    ],
)
def test_a_time_has_the_unit_that_fits(seconds: float | None, text: str) -> None:
    """A duration is shown in the unit that fits it, from microseconds to hours.

    If it rounds up to one of the next unit, it is shown in that unit.
    """
    assert duration(seconds) == text


def test_rates_and_shares_have_three_digits() -> None:
    """Rates and shares have three digits. An unknown rate is a dash."""
    assert (rate(None), rate(12.34), rate(0), rate(10_000)) == ("-", "12.3/s", "0/s", "10 k/s")
    assert (percent(0.1234), percent(0.5), percent(1)) == ("12.3%", "50%", "100%")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("statsu", "; did you mean 'status'?"),
        ("xyz", "; known are status, top"),
        ("statu" * 10**6, "; known are status, top"),
    ],
)
def test_an_unknown_word_gets_the_nearest_one(word: str, hint: str) -> None:
    """A hint about an unknown word has the nearest known word, or else all known words.

    Only the start of a long word is compared.
    """
    assert nearest(word, ["status", "top"]) == hint


def test_names_sort_as_people_count() -> None:
    """Numbers in names are compared as numbers, so m2 comes before m10. A name may begin with a number or have none."""
    names = ["m10", "m", "10", "m2", "9", "m2b10", "m2b9", "a"]
    assert sorted(names, key=by_number) == ["9", "10", "a", "m", "m2", "m2b9", "m2b10", "m10"]


def test_an_error_without_a_file_gets_the_one_that_was_worked_on(tmp_path: Path) -> None:
    """If an error of the system names no file, as on a full disk, its text gets the path that the program was working on."""
    with pytest.raises(OSError, match="No space") as failed, naming(tmp_path), open("/dev/full", "w") as full:
        full.write("text")
    assert os_error(failed.value) == f"{tmp_path}: No space left on device"
    with pytest.raises(FileNotFoundError) as missing, naming(tmp_path):
        (tmp_path / "missing").read_text()
    assert os_error(missing.value) == f"{tmp_path / 'missing'}: No such file or directory"


def test_of_many_errors_of_a_copy_the_first_one_is_shown(tmp_path: Path) -> None:
    """If a copy of many files fails, as on a full disk, only the first error is shown."""
    for name in ("a", "b"):
        (tmp_path / "source" / name).mkdir(parents=True)
        (tmp_path / "source" / name / "file").symlink_to("missing")
    with pytest.raises(shutil.Error) as failed:
        shutil.copytree(tmp_path / "source", tmp_path / "target")
    message = os_error(failed.value)
    assert message.startswith(str(tmp_path / "target"))
    assert message.endswith("/file: No such file or directory")
