"""The file with a card's figures and tuning, and the names of cards for rsrv-gen."""

from pathlib import Path

import pytest

from rsrv.cards import CARDS, CardProfile, ProfileError, read_profile, write_profile
from rsrv_gen.cli import parser

PROFILE = CardProfile(
    card="NVIDIA L4",
    capability="8.9",
    versions="jax 0.10.2",
    target='device_description_str: "NVIDIA L4"',
    tuning="version: 3\nresults {\n}\nresults {\n}\n",
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A profile is the same after it was written to a file and read. It counts its tuned kernels."""
    write_profile(tmp_path / "l4.profile", PROFILE)
    profile = read_profile(tmp_path / "l4.profile")
    assert profile == PROFILE
    assert profile.kernels == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "card": "L4"}'])
def test_another_file_is_no_profile(tmp_path: Path, content: str) -> None:
    """If a file is not a profile, the error names the command that makes one."""
    path = tmp_path / "l4.profile"
    path.write_text(content)
    with pytest.raises(ProfileError, match=r"is not a profile of a card .*: rsrv gpu profile"):
        read_profile(path)


def test_a_missing_profile_says_so(tmp_path: Path) -> None:
    """The error for a missing profile has the system's reason."""
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        read_profile(tmp_path / "l4.profile")


def test_a_misspelled_card_is_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    """If the name of a card is unknown, the command refuses it before it reads any bundle."""
    with pytest.raises(SystemExit):
        parser().parse(["bundles", "-o", "gen", "--compile-for", "h10"])
    assert "unknown card 'h10', and no such file" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(CARDS))
def test_a_card_is_described_as_xla_reads_it(name: str) -> None:
    """The description of a card for XLA is one text-format message. It has the card's name as the driver reports it."""
    text = CARDS[name].target()
    assert text.count("{") == text.count("}")
    assert f'device_description_str: "{CARDS[name].kind}"' in text


def test_an_execution_takes_its_compute_or_its_memory_traffic_and_its_launches() -> None:
    """The estimated time of an execution is the larger of its compute time and its memory time, plus the time of its launches.

    TF32 shortens the compute time. A card without TF32 computes in f32.
    """
    h100, t4 = CARDS["h100"], CARDS["t4"]
    assert h100.seconds(494e12, 0, 0, tf32=True) == pytest.approx(1)
    assert h100.seconds(h100.f32_rate, 0, 0, tf32=False) == pytest.approx(1)
    assert t4.seconds(t4.f32_rate, 0, 0, tf32=True) == pytest.approx(1)
    assert h100.seconds(1, 2 * h100.bandwidth, 10, tf32=True) == pytest.approx(2 + 30e-6)
