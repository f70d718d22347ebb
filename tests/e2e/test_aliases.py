"""Aliases on a real server: one model, a split, and live changes without a lost request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.cli import main as rsrv
from tests.e2e.calls import Caller, Refused, caller
from tests.e2e.harness import EXPLICIT, HURRY, RunningTriton, make_repository, running_triton
from tests.e2e.lives import COLUMNS, Living, place, write_version
from tests.waiting import wait_until

SETTINGS = "lifecycle: {poll_s: 0.1}\naliases: {champion: v1, fraud: {v1: 50, v2: 50}}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """Yield a server with two versions of one model. The answer of a version has its number."""
    folder = tmp_path_factory.mktemp("aliases")
    for number in (1, 2):
        write_version(folder / "bundles" / f"v{number}", number)
    gen = make_repository(folder, settings=SETTINGS)
    with running_triton(gen, folder / "server.log", extra_args=[*EXPLICIT, HURRY]) as running:
        yield running


def answer(call: Caller, name: str, **parameters: Any) -> int:
    """Return the number of the model that answers."""
    return int(call(name, {"x": np.zeros((1, COLUMNS), np.float32)}, parameters=parameters)["first"][0, 0])


def test_aliases_move_between_models_under_load(
    server: RunningTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    """Aliases split requests. rsrv.yaml and `rsrv alias` move a name without a failed request. Errors name the alias and the model."""
    answers: Counter[int] = Counter()
    stop = threading.Event()

    def ask() -> None:
        with caller(server) as call:
            while not stop.is_set():
                answers[answer(call, "champion")] += 1

    with caller(server) as call:
        split = Counter(answer(call, "fraud") for _ in range(60))
        assert split.keys() == {1, 2}
        sticky = {answer(call, "fraud", rsrv_sticky="user 7") for _ in range(10)}
        assert len(sticky) == 1
        with pytest.raises(Refused, match="alias 'champion', model 'v1': "):
            answer(call, "champion", rsrv_priority=-1)

        load = threading.Thread(target=ask)
        load.start()
        wait_until(lambda: answers[1] > 20, what="answers of the first model")
        settings = Path(server.server.model_repository) / "rsrv.yaml"
        settings.write_text(settings.read_text().replace("champion:\n    v1: 1", "champion:\n    v2: 1"))
        wait_until(lambda: answers[2] > 20, what="answers of the second model")
        answers.clear()
        wait_until(lambda: answers[2], what="a further answer of the second model")
        assert rsrv.main(["alias", "champion", "v1", "--server", str(server.http_port)]) == 0
        assert capsys.readouterr().out == "champion: v1 100%\n"
        assert answer(call, "champion") == 1
        assert rsrv.main(["alias", "--server", str(server.http_port)]) == 0
        assert capsys.readouterr().out == "champion: v1 100%\nfraud: v1 50%, v2 50%\n"
        wait_until(lambda: answers[1], what="another answer of the first model")
        stop.set()
        load.join()
    assert answers.keys() == {1, 2}


def test_the_others_answer_for_a_model_that_does_not_load(
    server: RunningTriton, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """If one model of an alias does not load, the other model answers. After its repair, both models answer."""
    source = write_version(tmp_path_factory.mktemp("mended") / "v3", 3)
    bundle = Path(server.server.model_repository).parent / "bundles" / "v3"
    hooks = source / "model.py"
    hooks.write_text("import nothing_here\n\n\ndef preprocess(inputs):\n    return inputs\n")
    place(source, bundle)
    wait_until(lambda: "v3 failed (attempt 1)" in server.log_text(), what="the model's failure")
    assert rsrv.main(["alias", "half", "v1", "v3", "--server", str(server.http_port)]) == 0
    with caller(server) as call:
        assert {answer(call, "half") for _ in range(20)} == {1}

        hooks.unlink()
        place(source, bundle)
        wait_until(lambda: answer(call, "half") == 3, what="an answer of the mended model")


def test_a_shadow_that_answers_otherwise_is_counted(
    server: RunningTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shadow of an alias answers differently from the alias's model.

    Clients get only the answers of the model, and the metrics count each answer of the shadow that differs.
    """
    life = Living(server)
    assert rsrv.main(["alias", "watched", "v1", "v2=shadow", "--server", str(server.http_port)]) == 0
    assert "watched: v1 100%, v2 shadow" in capsys.readouterr().out
    with caller(server) as call:
        assert {answer(call, "watched") for _ in range(20)} == {1}

    different = 'rsrv_alias_shadows_total{alias="watched",model="v2",device="0",outcome="different"} 20'
    wait_until(lambda: different in life.metrics, what="the differences")

    def rows() -> list[list[str]]:
        assert rsrv.main(["status", "watched", "--server", str(server.http_port)]) == 0
        lines = capsys.readouterr().out.splitlines()
        table = [line.split() for line in lines if line.startswith("watched")]
        return [row[1:3] + row[4:] for row in table]

    expected = [["v1", "100%", "20", "0"], ["v2", "shadow", "0", "0", "20", "different"]]
    # The two models report their counts at different times.
    wait_until(lambda: rows() == expected, what=f"{rows()} to be {expected}")
    assert 'rsrv_alias_responses_total{alias="watched",model="v2"' not in life.metrics
    life.close()
