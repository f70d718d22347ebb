"""The command `rsrv plan`: how many more models a recorded scenario can have, and how few cards and bytes it needs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.cli import main as cli
from rsrv.sim.plan import Answer, busiest, estimate, last_good, plan, try_out, with_copies
from rsrv.sim.scenario import Scenario, parse_scenario


def recorded(models: str, every_s: float = 0.1, device: str = "warm: true", names: str = "ab") -> Scenario:
    """Return a scenario of four seconds. Requests of one row are sent to the models in turn, `every_s` seconds apart."""
    requests = ", ".join(
        f"{{t: {number * every_s:.3f}, model: {names[number % len(names)]}}}"
        for number in range(round(4 / every_s))
    )
    return parse_scenario(f"device: {{{device}}}\nmodels: {models}\narrivals: [{requests}]")


def answers(scenario: Scenario, p99_s: float) -> dict[str, Answer]:
    """Return the plan's answer to each question, or the first one if a question has several answers."""
    by_question: dict[str, Answer] = {}
    for answer in plan(busiest(scenario), p99_s, lambda what: None):
        by_question.setdefault(answer.question, answer)
    return by_question


def test_room_for_more_models() -> None:
    """A device that is busy for a fifth of the time can have more models with equal traffic.

    The plan's answer is the largest number of models for which the p99 latency is within the goal.
    """
    by_question = answers(recorded("{a: {cost: {1: 0.02}}, b: {cost: {1: 0.02}}}"), 0.1)

    assert by_question["as it is"].answer == "2 models on 1 card, no budget"
    more = int(by_question["more models"].answer.split(",")[0])
    assert 4 <= more <= 9
    assert by_question["more models"].trial is not None
    assert by_question["more models"].trial.p99_s <= 0.1  # type: ignore[operator]
    scenario = busiest(recorded("{a: {cost: {1: 0.02}}, b: {cost: {1: 0.02}}}"))
    assert not try_out(with_copies(scenario, more + 1)).meets(0.1)
    assert by_question["fewest cards"].answer == "1"
    assert by_question["smallest weight budget"].answer.startswith("not known")


def test_too_little_of_everything() -> None:
    """An overloaded device can have no further models. The plan answers how many cards the models need."""
    by_question = answers(recorded("{a: {cost: {1: 0.15}}, b: {cost: {1: 0.15}}}"), 0.4)

    assert by_question["more models"].answer == "none"
    assert by_question["fewest cards"].answer == "2"


def test_the_smallest_budget() -> None:
    """The smallest budget is enough for the own weights of all used models, and for one copy of their shared weights.

    A model without requests needs no bytes.
    """
    model = "{cost: {1: 0.001}, weight_bytes: 1000, shares: {base: 800}}"
    device = "warm: true, h2d_bytes_per_s: 1000"
    by_question = answers(recorded(f"{{a: {model}, b: {model}}}", device=device), 0.05)

    assert by_question["smallest weight budget"].answer == "1200 bytes (1.2 kB); all weights are 1.2 kB"
    apart = "{cost: {1: 0.001}, weight_bytes: 1000}"
    by_question = answers(recorded(f"{{a: {apart}, b: {apart}}}", device=device, names="a"), 0.05)
    assert by_question["smallest weight budget"].answer == "1000 bytes (1 kB); all weights are 2 kB"


def test_narrow_weights() -> None:
    """If weights have a half or a quarter of the bytes, all models fit into the budget. Only first requests wait for a load."""
    model = "{cost: {1: 0.001}, weight_bytes: 1000}"
    device = "h2d_bytes_per_s: 100000, weight_budget_bytes: 1500"
    scenario = busiest(recorded(f"{{a: {model}, b: {model}}}", device=device))
    narrow = [
        answer
        for answer in plan(scenario, 0.05, lambda what: None)
        if answer.question in ("as it is", "narrow weights")
    ]
    assert [answer.answer for answer in narrow] == [
        "2 models on 1 card, a budget of 1.5 kB",
        "bf16, 1 kB if all are f32 now",
        "i8, 500 B if all are f32 now",
    ]
    p99_s = [answer.trial.p99_s for answer in narrow if answer.trial is not None]
    # With a half and a quarter of the bytes, only the first requests wait for a load, so they have the longest latencies.
    assert p99_s[0] == pytest.approx(0.011)
    assert p99_s[1:] == [pytest.approx(0.006), pytest.approx(0.0035)]


def test_batch_sizes() -> None:
    """If requests of one row are padded to 8 rows, the plan proposes a smaller size, and names sizes that are hardly used.

    It estimates how much device time this saves.
    """
    by_question = answers(recorded("{a: {cost: {8: 0.016, 16: 0.032, 32: 0.064}}}", names="a"), 1.0)

    assert by_question["batch sizes"].answer == (
        "a: also export 1; leave out 8, 16, which are hardly used: about 87.5% less device time"
    )


def test_sizes_that_stay() -> None:
    """If a model has only one size, the costs of other sizes cannot be estimated, so the plan proposes no change."""
    assert answers(recorded("{a: {cost: {8: 0.016}}}", names="a"), 1.0)["batch sizes"].answer == "as they are"


def test_an_estimate_between_and_below_what_was_measured() -> None:
    """The cost of a size without a measurement is estimated by a line through the costs of two measured sizes.

    Below the smallest measured size, the estimated cost per row is at least the cost per row of that size.
    """
    costs = {(0, 4): 0.004, (0, 8): 0.006, (1, 1): 9.0, (0, 16): 0.04}
    assert estimate(costs, (0, 8)) == 0.006
    assert estimate(costs, (0, 6)) == pytest.approx(0.005)
    assert estimate(costs, (0, 2)) == pytest.approx(0.003)
    assert estimate({(0, 8): 0.008, (0, 16): 0.1}, (0, 2)) == pytest.approx(0.002)


@given(limit=st.integers(0, 300), most=st.integers(1, 300))
def test_a_search(limit: int, most: int) -> None:
    """The search returns the largest good number, or a number that is at most a 32nd smaller.

    It tries no number above the maximum, and no number twice.
    """
    tried: list[int] = []

    def good(number: int) -> bool:
        tried.append(number)
        return number <= limit

    last = min(limit, most)
    assert last - last // 32 <= last_good(good, most) <= last
    assert max(tried) <= most
    assert len(tried) == len(set(tried)) <= 18


def test_the_busiest_part_of_a_long_record() -> None:
    """`busiest` keeps only part of a long record: the given number of requests that arrive in the shortest time.

    The times of the kept requests begin at 0.
    """
    times = [0.0, 1.0, 2.0, 2.1, 2.2, 9.0]
    requests = ", ".join(f"{{t: {t}, model: a}}" for t in times)
    scenario = parse_scenario(f"models: {{a: {{cost: {{1: 0.1}}}}}}\narrivals: [{requests}]")

    assert [arrival.t for arrival in busiest(scenario, 3).recorded[0]] == [0.0, 0.1, 0.2]
    assert busiest(scenario, 3).duration == pytest.approx(0.201)


def test_ctrl_c_keeps_the_answers_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Ctrl-C ends a plan, the answers so far are printed. The exit status says that the plan is not complete."""

    def stopped(*_: object) -> Iterator[Answer]:
        yield Answer("as it is", "1 model", None)
        raise KeyboardInterrupt

    monkeypatch.setattr("rsrv.sim.plan.plan", stopped)
    trace = tmp_path / "day.csv"
    trace.write_text("t,model\n0,m\n")
    trace.with_suffix(".yaml").write_text("models: {m: {cost: {1: 0.01}}}\narrivals: {trace: day.csv}\n")
    assert cli.main(["plan", str(trace), "--p99", "50ms"]) == 130
    assert "as it is" in capsys.readouterr().out


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv plan` reads the scenario beside the trace.

    A wrong goal, a missing file and a trace without requests are reported.
    """
    trace = tmp_path / "out.csv"
    trace.write_text("t,model\n0,a\n1,a\n")
    assert cli.main(["plan", str(trace), "--p99", "50ms"]) == 1
    assert f"rsrv plan: {tmp_path / 'out.yaml'} cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", str(trace), "--p99", "50"])
    assert "'50' is not a time, such as 50ms or 2s" in capsys.readouterr().err

    (tmp_path / "out.yaml").write_text("models: {a: {cost: {1: 0.04}}}\narrivals: []\n")
    assert cli.main(["plan", str(trace), "--p99", "50ms"]) == 1
    assert "out.csv has no requests: record while" in capsys.readouterr().err

    (tmp_path / "out.yaml").write_text("models: {a: {cost: {1: 0.04}}}\narrivals: {trace: out.csv}\n")
    assert cli.main(["plan", str(trace), "--p99", "50ms"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[0].endswith("out.yaml: 2 requests in 1 s; goal: p99 of 50 ms")
    assert "as it is" in output.out.splitlines()[2]
    assert cli.main(["plan", str(trace), "--p99", "1s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["p99_s"] == pytest.approx(0.04)
