"""Generations: the next chunk of tokens of each generation, and the consequences of each token that a step returns.

A generation is a sequence of a generative model. Its prompt is read in chunks of the compiled lengths. Afterwards, each
returned token is the next chunk. Times are arguments. This module neither sends nor executes anything. `stateful_requests` does
both. A live generation always has exactly one step, which waits or executes. A step that ends without an execution ends the
generation. A step that has executed ends the generation, or the generation submits its next step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rsrv.histogram import SECONDS, Histogram
from rsrv.wire.frames import Status
from rsrv.wire.generation import Generate, find_length_problem
from rsrv_bundle.spec import GenerateSpec

#: Maximum seconds of a chunk of a prompt if other requests wait. This is about one execution of a small model.
_CHUNK_S = 0.005
#: While other requests wait, a chunk may take longer than `_CHUNK_S`, but at most as long as this many steps of its own model. A
#: prompt that is read token by token needs far more steps, and other requests would wait for all of these.
_CHUNK_STEPS = 4
#: Number of seeds. Each is exact in f32.
_SEEDS = 1 << 24


class GenerationState(StrEnum):
    """Stage of a generation."""

    #: The generation waits for a slot.
    WAITING = "waiting"
    #: Chunks of the prompt execute.
    PREFILLING = "prefilling"
    #: Each step returns a token.
    GENERATING = "generating"
    ENDED = "ended"


class GenerationEvent(StrEnum):
    """Event that moves a generation to another state."""

    #: The sequence got a slot.
    GRANTED = "granted"
    #: The last chunk of the prompt was executed.
    PROMPT_READ = "prompt read"
    END = "end"


S, E = GenerationState, GenerationEvent

TRANSITIONS: Mapping[tuple[GenerationState, GenerationEvent], GenerationState] = {
    (S.WAITING, E.GRANTED): S.PREFILLING,
    (S.WAITING, E.END): S.ENDED,
    (S.PREFILLING, E.PROMPT_READ): S.GENERATING,
    (S.PREFILLING, E.END): S.ENDED,
    (S.GENERATING, E.END): S.ENDED,
}


#: Name of the frame that reports an event to the stub.
EFFECTS: Mapping[GenerationEvent, str] = {E.END: "DONE"}


class GenerationError(AssertionError):
    """An event that the generation's state does not allow."""


@dataclass(slots=True)
class GenerationCounts:
    """Counters of one model's generations."""

    #: Number of generations in progress.
    active: int = 0
    #: Number of prompt tokens that were read.
    tokens_in: int = 0
    #: Number of answer tokens that were sent.
    tokens_out: int = 0
    #: Number of tokens of the prompts whose answers have at least one token. Other prompts were read only in part, or were
    #: answered with a stop at once.
    answered_in: int = 0
    #: Seconds from a generation's arrival to its first token.
    first: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: Seconds from each token to the next.
    between: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    def to_json(self) -> dict[str, Any]:
        return {
            "active": self.active,
            "tokens": {"prompt": self.tokens_in, "answer": self.tokens_out},
            "first": self.first.to_json(),
            "between": self.between.to_json(),
        }

    def sums(self) -> dict[str, float]:
        """Return sums for the computation of means: number of answers with a token, numbers of tokens, and seconds."""
        return {
            "answers": sum(self.first.counts),
            "tokens_in": self.answered_in,
            "tokens_out": self.tokens_out,
            "first_token_s": self.first.sum,
            "token_s": self.between.sum,
        }


class Chunk(NamedTuple):
    """The input of one step: tokens of one sequence, for the variant that has room for them."""

    variant: int
    tokens: Sequence[int] | npt.NDArray[np.int32]


class End(NamedTuple):
    """The end of a generation, as its completion reports it."""

    status: Status
    text: str


class Chunks:
    """The compiled lengths of chunks by variant, and the seconds that one row of each variant takes."""

    def __init__(self, lengths: Sequence[int], seconds: Sequence[float]) -> None:
        self.lengths = tuple(lengths)
        self._seconds = tuple(seconds)
        self.shortest = self.lengths.index(min(self.lengths))

    def choose(self, left: int, *, others_wait: bool) -> int:
        """Return the variant that reads the next of `left` tokens fastest, by tokens per second.

        If the shortest variant has room for all these tokens, return the shortest variant. All steps after the prompt also use
        it, so both kinds of steps can share an execution. `others_wait`: True if other requests wait, so that the chunk must be
        short.
        """
        if left <= self.lengths[self.shortest]:
            return self.shortest
        limit = max(_CHUNK_S, _CHUNK_STEPS * self._seconds[self.shortest]) if others_wait else inf
        variants = [variant for variant, seconds in enumerate(self._seconds) if seconds <= limit]
        return min(
            variants,
            key=lambda variant: (
                self._seconds[variant] / min(self.lengths[variant], left),
                -self.lengths[variant],
            ),
        )


def find_problem(ask: Generate, spec: GenerateSpec) -> str:
    """Return the reason why a generation is not possible, or "" if it is possible."""
    if problem := find_length_problem(len(ask.prompt), spec.context):
        return problem
    if ask.max_tokens is not None and ask.max_tokens < 1:
        return f"max_tokens is {ask.max_tokens}; it must be at least 1"
    if not (isfinite(ask.temperature) and ask.temperature >= 0):
        return f"temperature is {ask.temperature}; it must be a number of at least 0"
    if not 0 < ask.top_p <= 1:
        return f"top_p is {ask.top_p}; it must be above 0 and at most 1"
    if not (isfinite(ask.tokens_per_s) and ask.tokens_per_s >= 0):
        return f"tokens_per_s is {ask.tokens_per_s}; it must be a number of at least 0"
    if ask.seed >= _SEEDS:
        return f"seed is {ask.seed}; it must be below {_SEEDS}"
    return ""


class Generation:
    """One generation, from its arrival to its end."""

    def __init__(
        self, ask: Generate, spec: GenerateSpec, chunks: Chunks, counts: GenerationCounts, now: float
    ) -> None:
        """Begin a generation that has no problem (`find_problem`)."""
        self.state = S.WAITING
        #: If this is set, the generation ends with it after the step under way, whatever token that step returns.
        self.ending: End | None = None
        #: Temperature, top_k, top_p and seed, in the form of the model's input.
        self.sampling = ask.temperature, float(min(ask.top_k, _SEEDS)), ask.top_p, float(ask.seed)
        #: Number of tokens of the answer that were sent.
        self.sent = 0
        most = spec.max_tokens if ask.max_tokens is None else ask.max_tokens
        self._left = min(most, spec.context - len(ask.prompt))
        self._stop = frozenset(spec.stop if ask.stop is None else ask.stop)
        self._chunks = chunks
        self._prompt = np.asarray(ask.prompt, np.int32)
        #: Number of tokens of the prompt that have executed.
        self._read = 0
        #: Number of tokens of the prompt in the step under way.
        self._taken = 0
        #: Latest token.
        self._last = 0
        #: Time when the latest token was returned, or when the request arrived.
        self._last_at = now
        self._since, self._rate = now, ask.tokens_per_s
        self._counts = counts
        counts.active += 1

    def _advance(self, event: GenerationEvent) -> None:
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise GenerationError(f"a generation is {self.state}, and cannot be {event} now")
        self.state = state

    def grant(self) -> None:
        """Record that the sequence has a slot."""
        self._advance(E.GRANTED)

    def end(self) -> None:
        """Record the end of the generation. Call this once."""
        self._advance(E.END)
        self._counts.active -= 1

    def next_chunk(self, *, others_wait: bool) -> Chunk:
        """Return the input of the generation's next step."""
        left = len(self._prompt) - self._read
        if not left:
            return Chunk(self._chunks.shortest, (self._last,))
        variant = self._chunks.choose(left, others_wait=others_wait)
        self._taken = min(self._chunks.lengths[variant], left)
        return Chunk(variant, self._prompt[self._read : self._read + self._taken])

    def due(self) -> float | None:
        """Return the time when the next token is due. None: the client asks for no rate."""
        return self._since + (self.sent + 1) / self._rate if self._rate else None

    def step(self, token: int, now: float) -> tuple[bool, End | None]:
        """Handle the token that a step returned. Return whether it belongs to the answer, and the generation's end or None.

        Tokens that are returned before the last chunk of the prompt do not belong to the answer.
        """
        if self.state is S.WAITING:
            raise GenerationError("a generation that waits for a slot has executed a step")
        if self.state is S.PREFILLING:
            self._read += self._taken
            self._counts.tokens_in += self._taken
        if self.ending is not None:
            return False, self.ending
        if token < 0:
            return False, End(
                Status.INTERNAL, "the model's logits were not finite, so there is no next token"
            )
        if self._read < len(self._prompt):
            return False, None
        if self.state is S.PREFILLING:
            self._advance(E.PROMPT_READ)
        if token in self._stop:
            return False, End(Status.OK, "stop")
        if not self.sent:
            self._counts.answered_in += len(self._prompt)
        seconds = self._counts.between if self.sent else self._counts.first
        seconds.observe(now - self._last_at)
        self._last, self._last_at = token, now
        self._counts.tokens_out += 1
        self.sent += 1
        return True, End(Status.OK, "length") if self.sent == self._left else None
