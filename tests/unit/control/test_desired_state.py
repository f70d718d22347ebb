"""`DesiredState`: the documents that say what runtimes should do, before and after the death of any process.

They are made from operators' commands, the file of overrides and rsrv.yaml.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest

from rsrv.control.desired_state import DesiredState
from rsrv.desired import DesiredDocument, changed, check_changes, difference
from rsrv.runtime.policy import Policy
from rsrv.settings import Settings, SettingsError, load_settings

_NAMES = "abcd"
_FILES = (
    "",
    "models: {a: {weight: 3}, d: {residency: device, idle: {device: 600}}}",
    "scheduler: {discipline: edf, max_queue_depth: 7}\nruntime: {idle: {host: 1h}}\nmodels: {b: {max_delay_us: 9}}",
)


def desired(tmp_path: Path, settings: Settings | None = None) -> DesiredState:
    """Return the desired state as the next control process reads it."""
    return DesiredState(settings or load_settings(), tmp_path / "overrides.json")


def command(state: DesiredState, rng: Random) -> None:
    """Carry out a random command of an operator."""
    some = rng.sample(_NAMES, rng.randint(1, 2))
    target, devices = rng.choice([some, None]), rng.choice([[0], [1], [0, 1]])
    chosen: Callable[[], None] = rng.choice(
        (
            lambda: state.configure(rng.choice([{"discipline": "fifo"}, {"depth": 2}, {"depth": None}])),
            lambda: state.set_models(some, rng.choice([{"weight": rng.choice([1, 5])}, {"max_delay_us": 7}])),
            lambda: state.set_residency(some, rng.choice(["unpinned", "system", "device"])),
            lambda: state.prefetch(some, devices),
            lambda: state.evict(target, devices),
            lambda: state.pause(target, rng.choice(["drain", "hold", "reject"])),
            lambda: state.pause(target, None),
        )
    )
    chosen()


def behaviour(policy: Policy) -> dict[str, Any]:
    """Return how a runtime schedules each model, including a model that is added later."""
    return {
        name: (policy.settings.for_model(name), policy.paused(name), policy.prefetched(name), policy.queue_depth(name))
        for name in [*_NAMES, "later"]
    }  # fmt: skip


def whole(policy: Policy, document: DesiredDocument) -> Policy:
    """Give a runtime the whole document, as at the start of a connection."""
    policy.change(check_changes(difference(policy.document, document)))
    return policy


def test_a_death_between_any_two_commands_leaves_document_settings_and_behaviour(tmp_path: Path) -> None:
    """After each of 200 random commands, a new runtime has the same document and behaves like the old one.

    A new control process makes the same documents. Some commands follow an edit of rsrv.yaml.
    """
    rng = Random(46)
    settings = load_settings()
    state = desired(tmp_path, settings)
    sent = [state.document(device) for device in (0, 1)]
    old = [whole(Policy(settings), document) for document in sent]
    for _ in range(200):
        if rng.random() < 0.1:
            settings = load_settings(rng.choice(_FILES))
            state.follow_file(settings)
        command(state, rng)
        for device in (0, 1):
            document = state.document(device)
            changes = difference(sent[device], document)
            assert changed(sent[device], changes) == document
            old[device].change(check_changes(changes))
            sent[device] = document

            new = whole(Policy(load_settings(rng.choice(_FILES))), document)

            assert new.document == old[device].document == document
            assert new.settings == old[device].settings
            assert behaviour(new) == behaviour(old[device])
        next_state = desired(tmp_path, settings)
        assert [next_state.document(device) for device in (0, 1)] == sent
        if rng.random() < 0.2:
            state = next_state


def test_a_command_wins_over_the_overrides_which_win_over_the_file(tmp_path: Path) -> None:
    """For each key, a command takes precedence over the overrides, and these over rsrv.yaml, even if the file changes later."""
    settings = load_settings(
        "scheduler: {discipline: edf}\nmodels: {a: {weight: 2, max_delay_us: 7, start: lazy}}"
    )
    first = desired(tmp_path, settings)
    first.configure({"discipline": "fifo"})
    first.set_models(["a"], {"weight": 5, "max_queue_depth": 9})

    state = desired(tmp_path, settings)
    state.set_models(["a"], {"max_queue_depth": 4})

    section = {"weight": 5, "max_delay_us": 7, "max_queue_depth": 4, "start": "lazy"}
    assert state.document(0)["models"] == {"a": {"settings": section}}
    assert state.document(0)["scheduler"]["discipline"] == "fifo"
    state.follow_file(
        load_settings("scheduler: {discipline: fair, meta_concurrency: 3}\nmodels: {a: {weight: 3}}")
    )
    assert state.document(0)["models"] == {"a": {"settings": {"weight": 5, "max_queue_depth": 4}}}
    assert (state.scheduler["discipline"], state.scheduler["meta_concurrency"]) == ("fifo", 3)


def test_the_document_of_the_file_alone_is_that_of_a_runtime_by_itself(tmp_path: Path) -> None:
    """Without commands, the document equals that of a runtime that has read rsrv.yaml itself, so nothing must be sent."""
    for text in _FILES:
        settings = load_settings(text)

        assert difference(Policy(settings).document, desired(tmp_path, settings).document(0)) == {}


@pytest.mark.parametrize(
    ("then", "remain"),
    [
        (lambda state: state.evict(["a"], [0]), "b"),
        (lambda state: state.evict(None, [0]), ""),
        (lambda state: state.evict(None, [1]), "ab"),
        (lambda state: state.set_residency(["a"], "system"), "b"),
        (lambda state: state.set_residency(["a"], "device"), "ab"),
    ],
)
def test_what_was_prefetched_is_until_it_is_evicted(
    tmp_path: Path, then: Callable[[DesiredState], None], remain: str
) -> None:
    """A prefetch lasts until an eviction on its device, of its model or of all models.

    It also ends if the model's residency becomes `system`.
    """
    state = desired(tmp_path)
    state.prefetch("ab", [0])

    then(state)

    models = state.document(0)["models"]
    assert "".join(name for name in "ab" if models.get(name, {}).get("prefetched")) == remain
    assert not any(model.get("prefetched") for model in state.document(1)["models"].values())


def test_a_load_that_failed_is_asked_for_again(tmp_path: Path) -> None:
    """A repeated pin or prefetch is a change, also for the next control process. A repeated pause is not."""
    state = desired(tmp_path)
    pin: Callable[[DesiredState], None] = lambda target: target.set_residency(["a"], "device")
    for again in (pin, lambda target: target.prefetch(["a"], [0])):
        again(state)
        before = state.document(0)
        state = desired(tmp_path)
        again(state)
        assert difference(before, state.document(0))
    state.pause(["a"], "hold")
    before = state.document(0)
    state.pause(["a"], "hold")
    assert state.document(0) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.set_models(["b", "a"], {"weight": 0}),
        lambda state: state.set_residency(["a"], "gpu"),
        lambda state: state.configure({"depth": "many"}),
    ],
)
def test_a_wrong_value_changes_nothing(tmp_path: Path, change: Callable[[DesiredState], None]) -> None:
    """A command with a wrong value is refused with the same message as rsrv.yaml, and changes nothing."""
    state = desired(tmp_path)
    before = state.revision, state.document(0)

    with pytest.raises(SettingsError, match=r"(models\.[ab]\.(weight|residency)|scheduler\.depth): must be"):
        change(state)

    assert (state.revision, state.document(0)) == before


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"scheduler": 3}', "\x00", '{"models": {"a": {"paused": "stop"}}}', '{"scheduler": {"depth": "x"}}',
     '{"models": {"a": {"settings": {"weight": 0}}}}', '{"models": {"a": {"pre'],
)  # fmt: skip
def test_a_spoiled_file_of_overrides_keeps_the_last_good_one(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If the file of overrides is malformed or half-written, its copy is used, and the log reports the error.

    If the copy is also malformed, there are no overrides.
    """
    state = desired(tmp_path)
    state.pause(["a"], "hold")
    (tmp_path / "overrides.json").write_text(text)

    assert desired(tmp_path).document(0) == state.document(0)

    assert "cannot be read from" in caplog.text
    (tmp_path / "overrides.last.json").write_text(text)
    assert desired(tmp_path).document(0)["models"] == {}


def test_a_full_disk_does_not_fail_what_was_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the file of overrides cannot be written, the command still succeeds, and the log reports the error."""
    state = desired(tmp_path / "missing")

    state.pause(["a"], "hold")

    assert state.document(0)["models"] == {"a": {"paused": "hold"}}
    assert "will not have them" in caplog.text


@pytest.mark.parametrize("mode", ["drain", None])
def test_a_pause_of_all_models_replaces_those_of_single_ones(
    tmp_path: Path, mode: Literal["drain"] | None
) -> None:
    """A later pause or resumption of all models replaces earlier pauses and resumptions of single models."""
    state = desired(tmp_path)
    state.pause(["a"], "hold")
    state.pause(None, "reject")
    state.pause(["b"], None)

    state.pause(None, mode)

    document = state.document(0)
    assert (document["paused"], document["models"]) == (mode, {})
