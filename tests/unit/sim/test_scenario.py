"""Errors of a scenario are reported with their keys, and say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest

from rsrv.runtime.stored_executables import CompileTarget, write_executables
from rsrv.sim.scenario import ScenarioError, parse_scenario

GOOD = "models: {a: {cost: {1: 0.001}}}\n"
SILENT = GOOD + "arrivals: []\n"


def problem(text: str, folder: Path = Path()) -> str:
    with pytest.raises(ScenarioError) as caught:
        parse_scenario(dedent(text), "s.yaml", folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "s.yaml: not valid YAML"),
        ("- 1", "s.yaml: must be a mapping of keys, not a list"),
        ("", "s.yaml: models: missing"),
        (GOOD, "s.yaml: arrivals: missing"),
        (SILENT + "sead: 1", "s.yaml: sead: unknown key; did you mean 'seed'?"),
        (SILENT + "zzz: 1", "zzz: unknown key; known are discipline, seed, duration"),
        (SILENT + "duration: 0", "duration: must be greater than 0"),
        (SILENT + "duration: .inf", "line 3: the number .inf is not finite"),
        (SILENT + "discipline: fivo", "discipline: there is no 'fivo'; did you mean 'fifo'?"),
        (SILENT + "device: {warmth: true}", "device.warmth: unknown key; did you mean 'warm'?"),
        (
            SILENT + "device: {h2d_bytes_per_s: 0}",
            "device.h2d_bytes_per_s: must be greater than or equal to 1",
        ),
        (SILENT + "settings: {dept: 2}", "settings.dept: unknown key; did you mean 'depth'?"),
        ("models: {}\narrivals: []", "models: "),
        ("models: {a: {}}\narrivals: []", "models.a: give either cost or variants, or compiled (found {})"),
        ("models: {a: {cost: {}}}\narrivals: []", "models.a.cost: "),
        (
            "models: {a: {cost: {1: 0}}}\narrivals: []",
            "models.a.cost.1: must be greater than or equal to 0.000000001",
        ),
        ("models: {a: {cost: {one: 1}}}\narrivals: []", "models.a.cost.one: must be a valid integer"),
        (
            "models: {a: {cost: {1: 1}, wait: 1}}\narrivals: []",
            "models.a.wait: unknown key; did you mean 'weight'?",
        ),
        (
            "models: {a: {cost: {1: 1}, count: 2}, a-1: {cost: {1: 1}}}\narrivals: []",
            "models.a-1: 'a-1' is also one",
        ),
        (GOOD + "arrivals: [{t: 0, model: b}]", "arrivals.0.model: there is no model 'b' in `models`"),
        (GOOD + "arrivals: [{t: 0, model: a, row: 2}]", "arrivals.0.row: unknown key; did you mean 'rows'?"),
        (GOOD + "arrivals: [{model: a}]", "arrivals.0.t: missing"),
        (GOOD + "arrivals: {poison: {rate: 1}}", "arrivals.poison: unknown key; did you mean 'poisson'?"),
        (GOOD + "arrivals: {poisson: {rate: 1}}", "duration: missing: say for how many seconds"),
        (GOOD + "arrivals: {closed: {clients: 1}}", "requests of arrivals.closed arrive"),
        (GOOD + "arrivals: {poisson: {rate: -1}}", "s.yaml: arrivals.poisson.rate: must be greater"),
        (GOOD + "arrivals: {poisson: {rat: 1}}", "arrivals.poisson.rat: unknown key; did you mean 'rate'?"),
        (GOOD + "arrivals: {poisson: [{rate: 1}, {rate: -1}]}", "arrivals.poisson.1.rate: must be"),
        (
            GOOD + "duration: 1\narrivals: {poisson: {rate: 1, models: [b]}}",
            "arrivals.poisson.models: there is no",
        ),
        (
            GOOD + "duration: 1\narrivals: {poisson: {rate: 1, models: {a: 0}}}",
            "at least one share must be above 0",
        ),
        (GOOD + "duration: 1\narrivals: {zipf: {rate: 1, models: [aa]}}", "in `models`; did you mean 'a'?"),
        (
            GOOD + "duration: 1\narrivals: {bursts: {every_s: 1, size: 1, models: [b]}}",
            "arrivals.bursts.models: ",
        ),
        (
            GOOD + "duration: 1\narrivals: {closed: {clients: 1, models: [b]}}",
            "arrivals.closed.models: there is",
        ),
        (GOOD + "arrivals: {trace: nowhere.csv}", "arrivals.trace: nowhere.csv: cannot be read"),
        ("models: {'': {cost: {1: 1}}}\narrivals: []", "at least 1 character"),
        ("models: {a: {cost: {true: 1}}}\narrivals: []", "must be a valid integer"),
        ("models: {a: {cost: {1: 1.0e+300}}}\narrivals: []", "less than or equal to"),
        ("models: {a: {cost: {1: 1}, weight: 1.0e-300}}\narrivals: []", "models.a.weight: "),
        (
            GOOD + "duration: 1\narrivals: {bursts: {every_s: 1.0e-300, size: 1}}",
            "arrivals.bursts.every_s: ",
        ),
        (GOOD + "arrivals: 3", "arrivals: must be a mapping (found 3)"),
        (GOOD + "arrivals: {poisson: 3}", "arrivals.poisson: must be a mapping (found 3)"),
    ],
)
def test_a_wrong_scenario_is_refused_by_key(text: str, message: str) -> None:
    """The error about a wrong value names the key of the value in the file."""
    assert message in problem(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no t and no model"),
        ("t,t,model\n", "names a column twice"),
        ("t,model\n0,a,1\n", "line 2: more fields than the header has"),
        ("t,modle\n", "has no model"),
        ("t,model,row\n", "unknown column 'row'; did you mean 'rows'?"),
        ("t,model\n0,a\nsoon,a\n", "traffic.csv, line 3: t: must be a valid number"),
        ("t,model\n0,b\n", "traffic.csv: there is no model 'b'"),
        ("t,model\n,a\n", "line 2: t: missing"),
    ],
)
def test_a_wrong_trace_is_refused_by_line(text: str, message: str, tmp_path: Path) -> None:
    """The error about a wrong trace names the file, the line and the known values."""
    (tmp_path / "traffic.csv").write_text(text, encoding="utf-8")

    assert message in problem(GOOD + "arrivals: {trace: traffic.csv}", tmp_path)


def test_all_problems_are_named_at_once() -> None:
    """All problems of a scenario are reported together."""
    lines = problem(GOOD + "discipline: lifo\narrivals: {poisson: {rate: 1, models: [x, y]}}").splitlines()

    assert len(lines) == 4
    assert all(line.startswith("s.yaml: ") for line in lines)


def test_a_scenario_written_as_json() -> None:
    """Keys of JSON are always texts, so compiled sizes may be texts of digits. Other texts are refused."""
    models = {"a": {"cost": {1: 0.001, 16: 0.002}}}
    scenario = parse_scenario(json.dumps({"models": models, "arrivals": []}))

    assert scenario.programs["a"].costs == {(0, 1): 0.001, (0, 16): 0.002}
    assert "models.a.cost.0: must be greater" in problem("models: {a: {cost: {'0': 1}}}\narrivals: []")
    assert "models.a.cost.1e3: must be a valid integer" in problem(
        "models: {a: {cost: {'1e3': 1}}}\narrivals: []"
    )


def test_equal_models_are_numbered() -> None:
    """An entry with a `count` stands for this number of equal models, whose names are numbered."""
    scenario = parse_scenario("models: {m: {cost: {1: 1}, count: 3, weight_bytes: 7}}\narrivals: []")

    assert list(scenario.programs) == ["m-0", "m-1", "m-2"]
    assert scenario.programs["m-2"].weight_bytes == 7


def test_settings_are_those_of_the_runtime() -> None:
    """The scheduler's settings come from the scenario's settings and from the device's budgets."""
    scenario = parse_scenario(
        SILENT + "settings: {depth: 2, meta_concurrency: 3}\ndevice: {weight_budget_bytes: 9}"
    )

    settings = scenario.settings
    assert (settings.depth, settings.meta_concurrency) == (2, 3)
    assert settings.weight_budget_bytes == 9


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """Return a folder with two files of executables.

    In l4.executables, one module of `dogs` has no estimate. In new.executables, no module has an estimate.
    """
    target = CompileTarget(card="NVIDIA L4", capability="8.9", versions="", flags="")
    write_executables(
        tmp_path / "l4.executables",
        target,
        False,
        {},
        {"m1": 0.001, "m8": 0.004},
        {"cats": {"0/1": "m1", "1/8": "m8"}, "dogs": {"0/1": "m1", "0/8": "m2"}},
    )
    write_executables(tmp_path / "new.executables", target, False, {}, {}, {"cats": {"0/1": "m1"}})
    return tmp_path


def test_costs_come_from_the_executables_of_a_card_as_estimates(compiled: Path) -> None:
    """With `compiled`, the costs of a model are the estimates in a file of executables.

    All models of a group have the same costs. The scenario remembers the card for which they are estimated.
    """
    scenario = parse_scenario(
        "models: {cats: {compiled: l4.executables, count: 2}}\narrivals: []", folder=compiled
    )
    assert scenario.programs["cats-1"].costs == {(0, 1): 0.001, (1, 8): 0.004}
    assert scenario.estimated == {"cats": "NVIDIA L4"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("cat: {compiled: l4.executables}", "has no model 'cat'; did you mean 'cats'?"),
        ("cats: {compiled: new.executables}", "has no estimates: rsrv does not know the rates of NVIDIA L4"),
        (
            "dogs: {compiled: l4.executables}",
            "has no estimate for 0/8 of dogs (variant/batch size), which did not",
        ),
        ("cats: {compiled: h100.executables}", "cannot be read"),
    ],
)
def test_a_missing_estimate_is_reported_by_its_key(compiled: Path, model: str, message: str) -> None:
    """A missing estimate is reported with the key of its model."""
    text = problem(f"models: {{{model}}}\narrivals: []", compiled)
    assert text.startswith(f"s.yaml: models.{model.partition(':')[0]}.compiled: ")
    assert message in text
