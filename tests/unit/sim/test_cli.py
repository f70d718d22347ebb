"""The command: files, streams and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rsrv.extras import install_command
from rsrv.sim.cli import main

GOOD = """
discipline: fifo
device: {warm: true}
models: {a: {cost: {1: 0.001}}, b: {cost: {1: 0.002}}}
arrivals: [{t: 0, model: a}, {t: 0, model: b}]
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_a_table_by_default(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without options, the command prints a table and writes no file."""
    assert main([str(scenario)]) == 0

    out = capsys.readouterr().out
    assert "2 requests in 3 ms, 2 served" in out
    assert [path.name for path in scenario.parent.iterdir()] == ["scenario.yaml"]


def test_decisions_alone_on_stdout(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --decisions, decisions are printed to stdout, and the table to stderr."""
    assert main([str(scenario), "--decisions"]) == 0

    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "t=0.000000 EXECUTE a size=1 rows=1 variant=0 requests=1",
        "t=0.001000 EXECUTE b size=1 rows=1 variant=0 requests=1",
    ]
    assert "2 served" in captured.err


def test_files_for_the_same_scenario_are_the_same(scenario: Path, tmp_path: Path) -> None:
    """Two runs of the same scenario write equal files, byte for byte. This includes the pictures."""
    for out in ("one", "two"):
        assert main([str(scenario), "--out", str(tmp_path / "deep" / out)]) == 0

    first, second = (sorted((tmp_path / "deep" / out).iterdir()) for out in ("one", "two"))
    assert [path.name for path in first] == ["latency.png", "metrics.json", "shares.png", "timeline.png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert json.loads(first[1].read_text())["total"]["served"] == 2


def test_a_wrong_scenario_is_1(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong scenario exits 1 with a line for each problem."""
    scenario.write_text(GOOD.replace("model: b", "model: c"), encoding="utf-8")

    assert main([str(scenario)]) == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"rsrv-sim: {scenario}: arrivals.1.model: there is no model 'c'")


def test_no_scenario_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file or a directory exits 1."""
    assert main([str(tmp_path / "none.yaml")]) == 1
    assert main([str(tmp_path)]) == 1

    output = capsys.readouterr().err
    assert "none.yaml cannot be read: No such file or directory. Name a file" in output
    assert output.count("cannot be read") == 2


@pytest.mark.parametrize("window", ["1", "2:1", "a:b", "-1:1", "0:inf"])
def test_a_wrong_window_is_2(window: str, scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong window exits 2."""
    with pytest.raises(SystemExit) as caught:
        main([str(scenario), f"--window={window}"])

    assert caught.value.code == 2
    assert "give two rising times in seconds" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_1(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unwritable folder, here a file, exits 1."""
    assert main([str(scenario), "--out", str(scenario)]) == 1

    assert "cannot write: --out" in capsys.readouterr().err


def test_without_matplotlib_there_are_metrics(
    scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib, metrics are written, and one line says how to get pictures."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "rsrv.sim.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    assert main([str(scenario), "--out", str(tmp_path / "out")]) == 0

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.json"]
    assert install_command("sim") in capsys.readouterr().err


def test_metrics_for_programs(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the metrics in place of the table."""
    assert main([str(scenario), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["total"]["served"] == 2


def test_a_sweep_over_idle_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep over idle limits gives one row of the table, and one point in the picture, for each limit.

    With a shorter limit, the mean host memory is no larger, and the p99 latency is no lower.
    """
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        """
        device: {weight_budget_bytes: 1000, h2d_bytes_per_s: 1000, read_bytes_per_s: 100}
        runtime: {idle: {device: 5s}}
        models: {a: {cost: {1: 0.5}, weight_bytes: 1000}}
        arrivals: [{t: 0, model: a}, {t: 100, model: a}]
        """
    )
    assert main([str(scenario), "--idle", "host=10s,1m,never", "--out", str(tmp_path / "out")]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["idle.host", "10s", "1m", "never"]
    runs = json.loads((tmp_path / "out/metrics.json").read_text())["idle"]
    assert [run["total"]["latency_p99_s"] for run in runs.values()] == [11.5, 11.5, 1.5]
    means = [run["total"]["host_bytes_mean"] for run in runs.values()]
    assert means == sorted(means)
    assert (tmp_path / "out/idle.png").read_bytes().startswith(b"\x89PNG")


def test_cold_starts_with_narrow_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--weights` simulates weights with a half or a quarter of the bytes.

    A cold start then reads and loads fewer bytes. The other parts of the start take as long as before.
    """
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        """
        device: {h2d_bytes_per_s: 1000, read_bytes_per_s: 100}
        runtime: {start: lazy}
        models: {a: {cost: {1: 0.5}, weight_bytes: 1000, start_s: 2}}
        arrivals: [{t: 0, model: a}, {t: 100, model: a}]
        """
    )
    command = [str(scenario), "--weights", "f32,bf16,i8", "--out", str(tmp_path / "out")]
    assert main(command) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["weights", "f32", "bf16", "i8"]
    runs = json.loads((tmp_path / "out/metrics.json").read_text())["weights"]
    assert [run["total"]["cold_p50_s"] for run in runs.values()] == [13.5, 8.0, 5.25]
    assert [run["total"]["read_bytes"] for run in runs.values()] == [1000, 500, 250]


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--idle", "disk=1m", "begin with one of device, host, executable"),
        ("--idle", "host=soon", "give times such as 90s"),
        ("--weights", "bf16,i4", "give some of f32,bf16,i8"),
    ],
)
def test_a_sweep_that_cannot_be(
    scenario: Path, option: str, value: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value for a sweep is refused, and the message says what to write."""
    with pytest.raises(SystemExit):
        main([str(scenario), option, value])

    assert problem in capsys.readouterr().err
