"""A generation reads its prompt in chunks, feeds each token back, and ends once."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.generation_steps import StepMemory
from rsrv.runtime.generations import (
    TRANSITIONS,
    Chunks,
    End,
    Generation,
    GenerationCounts,
    GenerationError,
    GenerationState,
    find_problem,
)
from rsrv.wire.frames import Status
from rsrv.wire.generation import Generate
from rsrv_bundle.spec import GenerateSpec

SPEC = GenerateSpec("tokens", "lengths", "sampling", "token", 64, (0,), 8, None, "{text}")
#: The lengths are 1, 16 and 128. A chunk of 128 takes longer than a prompt may take while other requests wait.
CHUNKS = Chunks((1, 16, 128), (0.001, 0.004, 0.06))


def begin(ask: Generate, counts: GenerationCounts | None = None, chunks: Chunks = CHUNKS) -> Generation:
    generation = Generation(ask, SPEC, chunks, counts or GenerationCounts(), 0.0)
    generation.grant()
    return generation


@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=63),
    lengths=st.lists(st.integers(2, 64), unique=True, max_size=3),
    answer=st.lists(st.integers(-1, 20), min_size=64, max_size=64),
    most=st.none() | st.integers(1, 70),
    cancelled_at=st.none() | st.integers(1, 20),
)
def test_every_generation_reads_its_prompt_and_ends_once(
    prompt: list[int], lengths: list[int], answer: list[int], most: int | None, cancelled_at: int | None
) -> None:
    """A generation's steps read the prompt in chunks, and then each token of its answer.

    The client gets the first tokens of the model's answer, within all limits, and never a stop token.
    """
    counts = GenerationCounts()
    chunks = Chunks([1, *lengths], [0.001 * length for length in [1, *lengths]])
    generation = begin(Generate(1, prompt, most), counts, chunks)
    fed: list[int] = []
    sent: list[int] = []
    steps = 0
    end: End | None = None
    while end is None:
        chunk = generation.next_chunk(others_wait=bool(steps % 2))
        assert 0 < len(chunk.tokens) <= chunks.lengths[chunk.variant]
        fed.extend(chunk.tokens)
        steps += 1
        if steps == cancelled_at:
            generation.ending = End(Status.CANCELLED, "")
        token = answer[len(sent)] if len(fed) >= len(prompt) else 5
        taken, end = generation.step(token, float(steps))
        if taken:
            sent.append(token)
    generation.end()

    assert fed == (prompt + sent)[: len(fed)]
    assert sent == answer[: len(sent)]
    assert len(sent) <= min(most or SPEC.max_tokens, SPEC.context - len(prompt))
    assert not {0, -1} & set(sent)
    assert (counts.active, counts.tokens_out) == (0, len(sent))
    assert counts.tokens_in == min(len(fed), len(prompt))
    assert sum(counts.first.counts) + sum(counts.between.counts) == len(sent)
    with pytest.raises(GenerationError, match="ended"):
        generation.end()


def test_own_stop_tokens_replace_the_models() -> None:
    """A client's stop tokens replace the model's. A client that wants no stop token sends an empty list."""
    generation = begin(Generate(1, [3], 2, stop=[9]))
    generation.next_chunk(others_wait=False)

    assert generation.step(0, 0.0) == (True, None)
    assert generation.step(9, 0.0) == (False, End(Status.OK, "stop"))


def test_chunks_are_the_fastest_that_let_others_wait_briefly() -> None:
    """Without other requests, the chunk that reads the most tokens per second is chosen.

    While others wait, a chunk may take at most 5 ms, or as long as four of the shortest ones.
    """
    assert CHUNKS.choose(128, others_wait=False) == 1
    assert Chunks((1, 128), (0.001, 0.06)).choose(128, others_wait=False) == 1
    assert Chunks((1, 128), (0.001, 0.006)).choose(128, others_wait=True) == 0
    assert Chunks((1, 128), (0.001, 0.005)).choose(128, others_wait=True) == 1
    assert Chunks((1, 16, 128), (0.04, 0.1, 0.6)).choose(128, others_wait=True) == 1


def test_a_last_token_takes_the_shortest_chunk() -> None:
    """The last token of a prompt takes the shortest chunk, even if a longer one was measured to be faster.

    Thus it shares the steps of others.
    """
    assert Chunks((16, 1), (0.001, 0.002)).choose(1, others_wait=False) == 1


def test_times_are_counted_from_the_arrival_and_from_token_to_token() -> None:
    """The first token's time begins with the arrival, so it includes the wait for a slot and the prompt.

    The time of a later token begins with the token before it.
    """
    counts = GenerationCounts()
    generation = begin(Generate(1, [3] * 20), counts)
    for now in (1.0, 2.0, 2.5, 3.0):
        generation.next_chunk(others_wait=False)
        generation.step(5, now)

    assert (sum(counts.first.counts), counts.first.sum) == (1, 2.0)
    assert (sum(counts.between.counts), counts.between.sum) == (2, 1.0)


def test_means_are_of_answers_that_have_a_token() -> None:
    """Mean lengths include only generations whose answer has a token.

    Generations that still read their prompt, or that end without a token, are left out.
    """
    counts = GenerationCounts()
    for prompt, token in ([3] * 10, 5), ([3] * 16, 0), ([3] * 128, 5):
        generation = begin(Generate(1, prompt), counts)
        generation.next_chunk(others_wait=True)
        generation.step(token, 1.0)

    sums = counts.sums()
    assert (sums["answers"], sums["tokens_in"], sums["tokens_out"]) == (1, 10, 1)
    assert counts.tokens_in == 42


def test_each_token_is_due_by_the_rate_that_was_asked_for() -> None:
    """Each token is due at the requested rate from the arrival, even if an earlier one was late.

    All steps of the prompt are due with the first token.
    """
    generation = Generation(Generate(1, [3] * 17, tokens_per_s=4.0), SPEC, CHUNKS, GenerationCounts(), 10.0)
    generation.grant()
    dues = []
    for now in (10.1, 10.2, 11.9, 12.0):
        dues.append(generation.due())
        generation.next_chunk(others_wait=False)
        generation.step(5, now)

    assert dues == [10.25, 10.25, 10.5, 10.75]
    assert begin(Generate(1, [3])).due() is None


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (Generate(1, []), "takes 1 to 63"), (Generate(1, [1] * 64), "has 64 tokens"), (Generate(1, [1], 0), "max_tokens is 0"),
        (Generate(1, [1], temperature=nan), "temperature"), (Generate(1, [1], temperature=-1.0), "temperature"),
        (Generate(1, [1], temperature=inf), "temperature"), (Generate(1, [1], top_p=0), "top_p"),
        (Generate(1, [1], top_p=1.5), "top_p"), (Generate(1, [1], top_p=nan), "top_p"),
        (Generate(1, [1], tokens_per_s=-1.0), "tokens_per_s"), (Generate(1, [1], tokens_per_s=inf), "tokens_per_s"),
        (Generate(1, [1], seed=1 << 24), "seed"), (Generate(1, [1] * 63), ""), (Generate(1, [1], 1000), ""),
    ],
)  # fmt: skip
def test_a_generation_that_cannot_be_has_a_reason(ask: Generate, problem: str) -> None:
    """A generation with an invalid value is refused. The reason names the value and the values that are allowed."""
    reason = find_problem(ask, SPEC)

    assert problem in reason
    assert bool(reason) == bool(problem)


def test_generations_lie_side_by_side() -> None:
    """Generations take the first free places of a block. When the block is full, they take places of another block."""
    memory = StepMemory(64, 128)
    places = [memory.take() for _ in range(65)]
    assert places == list(range(65))
    (first, start), (second, after) = memory.locate(0), memory.locate(1)
    assert first is second
    assert after - start == 192
    assert memory.locate(64)[0] is not first
    memory.give(7)
    memory.give(3)
    assert [memory.take(), memory.take(), memory.take()] == [3, 7, 65]


def test_a_step_without_a_slot_is_an_error() -> None:
    """A step of a generation without a slot is an error. It would execute on the state of another sequence."""
    generation = Generation(Generate(1, [1]), SPEC, CHUNKS, GenerationCounts(), 0.0)

    with pytest.raises(GenerationError, match="waits for a slot"):
        generation.step(5, 0.0)
    assert {state for state, _ in TRANSITIONS} == set(GenerationState) - {GenerationState.ENDED}
