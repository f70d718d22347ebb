"""The words for the states of models. One function chooses the word, and one table explains it."""

import re
from pathlib import Path
from typing import Any

import pytest

from rsrv.control import messages
from rsrv.control.sentences import lives
from rsrv.control.v1 import control_pb2 as pb
from tests.combinations import ROWS
from tests.unit.control.peers import model_record

PAGE = Path(__file__).parents[3] / "docs/operating.md"


def status(*models: pb.ModelStatus, failed: str = "", asleep: bool = False) -> pb.GetStatusResponse:
    failures = [pb.Failure(name=name, text="no manifest") for name in failed.split()]
    device = pb.DeviceStatus(asleep_since_unix_s=1.0) if asleep else pb.DeviceStatus()
    return pb.GetStatusResponse(models=models, failures=failures, devices=[device])


def model(state: Any, weights: str = "", starting: str = "") -> pb.ModelStatus:
    return pb.ModelStatus(
        name="a",
        versions=[pb.Version(state=state)],
        record=pb.ModelRecord(weights_state=weights),
        starting=starting,
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (status(model(pb.STATE_COLD)), "cold"),
        (status(model(pb.STATE_LOADING, starting="compiling")), "starting, compiling"),
        (status(model(pb.STATE_READY, "resident", "importing model.py")), "starting, importing model.py"),
        (status(model(pb.STATE_READY, "absent")), "warm"),
        (status(model(pb.STATE_READY, "resident")), "resident"),
        (status(model(pb.STATE_LEAVING)), "leaving"),
        (status(model(pb.STATE_FAILED)), "failed"),
        (status(failed="a"), "failed"),
        (status(pb.ModelStatus(name="a"), failed="a"), "failed"),
        (status(model(pb.STATE_READY, "resident"), failed="a"), "resident, in an older version"),
        (status(model(pb.STATE_COLD), failed="a"), "cold, in an older version"),
        (status(model(pb.STATE_COLD), asleep=True), "asleep"),
        (status(model(pb.STATE_READY, "on disk"), asleep=True), "asleep"),
        (status(model(pb.STATE_READY), asleep=True), "asleep"),
        (status(model(pb.STATE_FAILED), asleep=True), "failed"),
    ],
)
def test_each_state_has_one_word_which_the_page_explains(answer: pb.GetStatusResponse, words: str) -> None:
    """Each state has one word, and the table on the page explains this word."""
    assert lives(answer) == {"a": words}
    section = PAGE.read_text().partition("### States of a model\n")[2].partition("\n**")[0]
    explained = re.findall(r"^\| (\S[^|]*) \|", section, re.MULTILINE)
    assert words.partition(",")[0] in explained
    assert not words.endswith("version") or "..., in an older version" in explained


def test_an_alias_that_is_not_served_is_no_model() -> None:
    """An alias that fails is not listed among the models, because its failure has its own line."""
    assert lives(status(failed="aliases.b")) == {}


def test_each_row_of_the_combinations_has_its_word() -> None:
    """For the states of a row of tests/combinations.py, the function chooses the word of that row."""
    states = {
        "none": pb.STATE_COLD,
        "loading": pb.STATE_LOADING,
        "failed": pb.STATE_FAILED,
        "leaving": pb.STATE_LEAVING,
    }
    for row in ROWS:
        bundle, _, _, runtime, weights = (min(cell - {"asleep"} or cell) for cell in row.cells)
        broken = "a" if row.word.endswith("older version") or bundle in ("broken", "failed") else ""
        step = "importing model.py" if row.word == "starting" else ""
        record = model(states.get(runtime, pb.STATE_READY), "absent" if weights == "any" else weights, step)
        answer = status(record, failed=broken, asleep=runtime == "asleep")
        if row.word.startswith("ready"):
            answer.metas.add(name="a", versions=record.versions)
            del answer.models[:]
        word = lives(answer)["a"]
        assert word.partition(",")[0] == row.word.partition(",")[0], row
        assert word.endswith("older version") == row.word.endswith("older version"), row
    assert {row.word.partition(",")[0] for row in ROWS} == {
        *("cold", "starting", "warm", "resident", "ready", "leaving", "failed", "asleep")
    }


def test_a_model_that_only_the_last_record_knows_is_asleep() -> None:
    """If a control process starts while the device sleeps, it knows no version of a model. The model is asleep all the same."""
    record = messages.model_status("a", {0: model_record()}, {}, pb.Policy(), "", "served", "Python front")

    assert lives(status(record, asleep=True)) == {"a": "asleep"}
