"""The table of pairs of features: on each front, a pair is served, refused or impossible. Pure.

Programs that check bundles take the texts of their refusals from here. A pair that the table lacks is refused as well, unless one
of its features belongs to a request or an event, such as a deadline. So a new feature of bundles is refused together with every
other one until an end-to-end test shows that the two work together.
`tools/compatibility_page.py` writes docs/compatibility.md from the table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from itertools import combinations
from typing import Final, Literal, NamedTuple


class Feature(StrEnum):
    """A feature of a model, of a server or of a request. The value is its name on the page."""

    HOOKS = "hooks"
    STRINGS = "strings"
    VARIANTS = "variants"
    PADDING = "padded lengths"
    #: State of clients' sequences.
    STATE = "sequences"
    GENERATION = "generation"
    TASK = "task"
    NARROW = "narrow weights"
    HALF = "half-precision compute"
    INTERNAL = "internal model"
    CALLED = "called by a meta model"
    META = "meta model, direct"
    BLS = "meta model, bls"
    ALIAS = "alias"
    SHADOW = "shadow of an alias"
    COLD = "cold start"
    WARM = "warm-up by an operator"
    DEVICES = "several devices"
    LARGE = "large requests"
    DEADLINE = "deadlines"
    PRIORITY = "priorities"
    CANCEL = "cancellation"
    SHARED_MEMORY = "a client's shared memory"
    CALLER = "calls of Triton's Python models"
    ENSEMBLE = "ensembles of Triton"
    DEATH = "death of a runtime"


Front = Literal["python", "native"]
FRONTS: Final[tuple[Front, ...]] = ("python", "native")
Pair = frozenset[Feature]
_F = Feature


class Cell(NamedTuple):
    """The table's entry for two features."""

    kind: Literal["served", "refused", "n/a", "untested"]
    #: The test that shows that the features work together, the text of the refusal, or the reason why the pair cannot occur.
    text: str


class Rule(NamedTuple):
    """A text about each of `features` together with each of `others`."""

    features: tuple[Feature, ...]
    others: tuple[Feature, ...]
    text: str


_METAS = (_F.META, _F.BLS)
_STATEFUL = (_F.STATE, _F.GENERATION)
_ALIASES = (_F.ALIAS, _F.SHADOW)

#: Key of each feature in the manifest. The error about a refused pair names the key of the feature in `Rule.features`.
_KEYS: Final[Mapping[Feature, str]] = {
    _F.STATE: "state",
    _F.GENERATION: "generate",
    _F.PADDING: "pad",
    _F.TASK: "task",
    _F.INTERNAL: "internal",
    _F.VARIANTS: "input_shapes",
}

#: Refused pairs. Errors about a called model or an alias put the name of the model in front of the text.
REFUSED: Final = (
    Rule((_F.PADDING,), _STATEFUL, "a model with state is not padded: its sequences would remember the padding"),
    Rule((_F.PADDING,), (_F.INTERNAL,), "only clients can call a padded model, and an internal model has no clients; remove pad or internal"),
    Rule((_F.PADDING,), _METAS, "a meta model has no lengths to pad; remove it"),
    Rule(_STATEFUL, _METAS, "a meta model has no state; remove it"),
    Rule((_F.GENERATION,), (_F.HOOKS,), "clients of a generation send and get text or tokens; remove model.py"),
    Rule((_F.VARIANTS,), _METAS, "a meta model has no compiled shapes; remove it"),
    Rule((_F.INTERNAL,), _STATEFUL, "a model with state serves the sequences of clients, which calls of meta models are not"),
    Rule((_F.INTERNAL,), _METAS, "only a bundle of kind 'model' has it, a meta model is public; remove it"),
    Rule((_F.TASK,), (_F.INTERNAL,), "clients cannot call an internal model; remove the task"),
    Rule((_F.NARROW, _F.HALF), _METAS, "has no modules of its own; narrow the bundles that it calls"),
    Rule((_F.CALLED,), _METAS, "which is a meta model; list the models that it calls"),
    Rule((_F.CALLED,), _STATEFUL, "which keeps state for the sequences of clients, and a call belongs to none"),
    Rule((_F.CALLED,), (_F.PADDING,), "which has a padded axis; only clients can call such a model, so export it without pad, and a directory of Hugging Face with a single length"),
    Rule(_ALIASES, _METAS, "which is a meta model: name a model"),
    Rule(_ALIASES, (_F.INTERNAL,), "which only meta models may call: its manifest says `internal: true`"),
    Rule(_ALIASES, (_F.STATE,), "which keeps state: a sequence must go to its model by name"),
    Rule((_F.SHADOW,), (_F.GENERATION,), "which answers with a stream, and streams are not compared: leave out the models with `shadow`"),
)  # fmt: skip

#: Pairs that cannot occur.
ABSENT: Final = (
    Rule(_METAS, (_F.HOOKS,), "`run` takes the place of hooks"),
    Rule((_F.META,), (_F.BLS,), "a server has one of the two transports"),
    Rule((_F.STATE,), (_F.GENERATION,), "clients of a generation send no sequences"),
    Rule((_F.LARGE,), _STATEFUL, "a request of a model with state has one row"),
    Rule((_F.INTERNAL,), (_F.SHARED_MEMORY, _F.CALLER, _F.ENSEMBLE), "only meta models call it"),
    Rule((_F.CANCEL,), (_F.CALLER, _F.ENSEMBLE), "Triton does not tell the called model"),
)

#: Features that the native front lacks, with the reason why a model with such a feature has the Python front.
PYTHON_ONLY: Final[Mapping[Feature, str]] = {
    **dict.fromkeys(_METAS, "it is a meta model"),
    _F.HOOKS: "it has hooks",
    **dict.fromkeys(_STATEFUL, "it keeps state"),
    _F.STRINGS: "only hooks and generations have strings",
    _F.INTERNAL: "only meta models call it",
    **dict.fromkeys(_ALIASES, "an alias has the Python front"),
}


class Proof(NamedTuple):
    """An end-to-end test that shows that any two of `features` work together."""

    #: Path and name of the test.
    test: str
    fronts: tuple[Front, ...]
    features: tuple[Feature, ...]


_BOTH: Final = FRONTS
_PYTHON: Final[tuple[Front, ...]] = ("python",)

_COMPOSED: Final = "tests/e2e/test_compatibility.py::test_the_compositions_answer_as_their_models"
_WITH_STATE: Final = "tests/e2e/test_compatibility.py::test_models_with_state_answer_as_their_models"
_EXPORTED: Final = (_F.VARIANTS, _F.TASK, _F.NARROW, _F.HALF)
_CLIENTS: Final = (_F.LARGE, _F.DEADLINE, _F.PRIORITY, _F.CANCEL, _F.SHARED_MEMORY, _F.CALLER, _F.ENSEMBLE)
_ASKED_WITH_STATE: Final = (_F.COLD, _F.DEVICES, _F.DEADLINE, _F.PRIORITY, _F.SHARED_MEMORY)
_ASKED: Final = (_F.COLD, _F.DEVICES, _F.DEATH, *_CLIENTS)

#: The page names the first test that has a pair. So tests of single pairs precede tests of many features.
PROOFS: Final = (
    Proof("tests/e2e/test_strings.py::test_strings_of_any_length_go_through_hooks", _PYTHON, (_F.HOOKS, _F.STRINGS)),
    Proof("tests/e2e/test_strings.py::test_a_meta_model_takes_passes_on_and_returns_strings", _PYTHON, (_F.META, _F.STRINGS)),
    Proof("tests/e2e/test_hugging_face.py::test_directories_are_served", _PYTHON, (_F.HOOKS, _F.STRINGS, _F.TASK, _F.VARIANTS)),
    Proof("tests/e2e/test_padding.py::test_a_request_of_many_rows_is_split_and_padded", _BOTH, (_F.PADDING, _F.VARIANTS, _F.LARGE)),
    Proof("tests/e2e/test_narrow.py::test_narrow_models_answer_as_their_sources", _PYTHON, (_F.NARROW, _F.HALF)),
    Proof("tests/e2e/test_large_requests.py::test_kills_between_parts_cost_no_answer", _PYTHON, (_F.LARGE, _F.DEATH)),
    Proof("tests/e2e/test_cold.py::test_models_start_with_their_first_requests", _PYTHON, (_F.COLD, _F.DEADLINE)),
    Proof("tests/e2e/test_aliases.py::test_a_shadow_that_answers_otherwise_is_counted", _PYTHON, _ALIASES),
    Proof("tests/e2e/test_metas.py::test_both_transports_give_the_same", _PYTHON, (_F.CALLED, _F.INTERNAL, _F.HOOKS)),
    Proof("tests/e2e/test_meta_faults.py::test_a_deadline_passes_before_the_gate", _PYTHON, (_F.META, _F.DEADLINE)),
    Proof("tests/e2e/test_meta_faults.py::test_a_deadline_passes_before_the_gate", _PYTHON, (_F.BLS, _F.DEADLINE)),
    Proof("tests/e2e/test_meta_faults.py::test_the_runtime_is_killed_in_the_middle_of_runs", _PYTHON, (_F.META, _F.DEATH)),
    Proof("tests/e2e/test_meta_faults.py::test_the_runtime_is_killed_in_the_middle_of_runs", _PYTHON, (_F.BLS, _F.DEATH)),
    Proof("tests/e2e/test_devices.py::test_a_run_goes_by_stage_where_its_callees_are_pinned_apart", _PYTHON, (_F.META, _F.DEVICES)),
    Proof("tests/e2e/test_sequences.py::test_interleaved_sequences_are_as_whole_ones", _PYTHON, (_F.STATE, _F.VARIANTS)),
    Proof("tests/e2e/test_sequences.py::test_an_ensemble_passes_sequences_on", _PYTHON, (_F.STATE, _F.ENSEMBLE)),
    Proof("tests/e2e/test_sequences.py::test_a_model_of_tritons_own_asks", _PYTHON, (_F.STATE, _F.CALLER)),
    Proof("tests/e2e/test_sequences.py::test_the_runtimes_death_ends_streams_and_sequences", _PYTHON, (_F.STATE, _F.DEATH)),
    Proof("tests/e2e/test_sequences.py::test_the_runtimes_death_ends_streams_and_sequences", _PYTHON, (_F.GENERATION, _F.DEATH)),
    Proof("tests/e2e/test_sequences.py::test_a_model_of_tritons_own_asks", _PYTHON, (_F.GENERATION, _F.CALLER)),
    Proof("tests/e2e/test_sequences.py::test_an_ensemble_streams_the_answer_of_its_step", _PYTHON, (_F.GENERATION, _F.ENSEMBLE)),
    Proof("tests/e2e/test_sequences.py::test_an_ensemble_streams_the_answer_of_its_step", _PYTHON, (_F.ENSEMBLE, _F.DEADLINE)),
    Proof("tests/e2e/test_sequences.py::test_a_client_that_goes_frees_its_slot", _PYTHON, (_F.GENERATION, _F.CANCEL)),
    Proof("tests/e2e/test_sequences.py::test_a_client_that_goes_frees_its_slot", _PYTHON, (_F.GENERATION, _F.DEADLINE)),
    Proof("tests/e2e/test_sequences.py::test_an_answer_streams_by_the_name_of_an_alias", _PYTHON, (_F.ALIAS, _F.GENERATION, _F.STRINGS, _F.VARIANTS, _F.TASK)),
    Proof(_WITH_STATE, _PYTHON, (_F.STATE, _F.HOOKS, _F.STRINGS, *_EXPORTED, *_ASKED_WITH_STATE)),
    Proof(_WITH_STATE, _PYTHON, (_F.GENERATION, _F.STRINGS, *_EXPORTED, *_ASKED_WITH_STATE)),
    Proof(_COMPOSED, ("native",), (*_EXPORTED, *_ASKED)),
    Proof(_COMPOSED, ("native",), (_F.PADDING, *_EXPORTED, *_ASKED)),
    Proof(_COMPOSED, ("native",), (_F.CALLED, *_EXPORTED, *_ASKED)),
    Proof(_COMPOSED, _PYTHON, (_F.HOOKS, _F.STRINGS, _F.PADDING, *_ALIASES, *_EXPORTED, *_ASKED)),
    Proof(_COMPOSED, _PYTHON, (_F.HOOKS, _F.STRINGS, _F.CALLED, *_EXPORTED, *_ASKED)),
    Proof(_COMPOSED, _PYTHON, (_F.HOOKS, _F.STRINGS, _F.CALLED, _F.INTERNAL, _F.VARIANTS, _F.NARROW, _F.HALF, *_ASKED)),
    Proof(_COMPOSED, _PYTHON, (_F.META, _F.STRINGS, _F.TASK, *_ASKED)),
)  # fmt: skip


#: Features of requests and events. A program that checks bundles and settings does not see them, so it cannot refuse them. Pairs
#: with one of them that have no test are "untested".
_LATER: Final = frozenset((*_ASKED, _F.WARM))
#: Other pairs without a test. They were accepted before this table existed. Remove entries, but add none.
UNTESTED: Final = (
    Rule((_F.BLS,), (_F.STRINGS, _F.TASK), ""),
    Rule((_F.CALLED,), _ALIASES, ""),
)


def cell(first: Feature, second: Feature, front: Front = "python") -> Cell:
    """Return the table's entry for two features on a front."""
    pair = frozenset((first, second))
    if text := _rules(REFUSED).get(pair):
        return Cell("refused", text[1])
    if text := _rules(ABSENT).get(pair):
        return Cell("n/a", text[1])
    if front == "native" and (lacking := pair & PYTHON_ONLY.keys()):
        return Cell("n/a", next(why for feature, why in PYTHON_ONLY.items() if feature in lacking))
    if test := _proven(front).get(pair):
        return Cell("served", test)
    if pair & _LATER or pair in _rules(UNTESTED):
        return Cell("untested", "")
    return Cell(
        "refused", f"no test shows that '{first}' and '{second}' work together; leave one of them out"
    )


def refusals(features: Collection[Feature]) -> Iterator[tuple[str, str]]:
    """Return the manifest's key and the text of each refused pair of a bundle's features."""
    for pair in combinations(sorted(features, key=list(Feature).index), 2):
        result = cell(*pair)
        if result.kind == "refused":
            named, _ = _rules(REFUSED).get(frozenset(pair), (pair[0], ""))
            yield _KEYS.get(named, ""), result.text


def refusal(role: Feature, features: Collection[Feature]) -> str:
    """Return why a model with these features cannot have a role, such as a target of an alias, or an empty text if it can."""
    return _first_refusal(cell(role, feature) for feature in features)


def native_obstacle(features: Collection[Feature]) -> str:
    """Return why a model with these features needs the Python front, or an empty text if it may have the native front."""
    for feature, why in PYTHON_ONLY.items():
        if feature in features:
            return why
    return _first_refusal(cell(*pair, "native") for pair in combinations(features, 2))


def _first_refusal(cells: Iterable[Cell]) -> str:
    return next((result.text for result in cells if result.kind == "refused"), "")


@cache
def _rules(rules: tuple[Rule, ...]) -> Mapping[Pair, tuple[Feature, str]]:
    """Return, for each pair of a rule, the feature of the pair that is in `rule.features`, and the rule's text."""
    return {
        frozenset((feature, second)): (feature, rule.text)
        for rule in rules
        for feature in rule.features
        for second in rule.others
    }


@cache
def _proven(front: Front) -> Mapping[Pair, str]:
    """Return, for each pair, the first test in PROOFS that shows that both work together."""
    return {
        frozenset(pair): proof.test
        for proof in reversed(PROOFS)
        if front in proof.fronts
        for pair in combinations(proof.features, 2)
    }
