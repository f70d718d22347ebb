"""Sequences and their slots: no slot serves two sequences, each request ends once, and nothing is left behind."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.sequences import SequenceEntry, SequenceState, SequenceTable, Verdicts
from rsrv.scheduler import events as ev
from rsrv.wire.frames import END, START, Status
from rsrv_bundle.spec import StateSpec, StateTensor, WhenFull

KEY = "m@1"
TIMEOUT_S = 10.0


class House:
    """The sequences of one model, and the requests that are executing, waiting and refused."""

    def __init__(self, slots: int = 2, when_full: WhenFull = "wait", limit: int = 100) -> None:
        self.sequences = SequenceTable()
        tensor = StateTensor("h", "f32", (8,))
        self.sequences.add(KEY, StateSpec(slots, (tensor,), TIMEOUT_S, when_full), 0)
        self.slots = slots
        self.limit = limit
        self.now = 0.0
        self._ids = iter(range(1, 10**9))
        #: Sequences of the requests in the scheduler, by the request's number.
        self.executing: dict[int, SequenceEntry] = {}
        #: Sequences of the requests that wait for a slot, by the request's number.
        self.waiting: dict[int, SequenceEntry] = {}
        self.refused: dict[int, tuple[Status, str]] = {}
        self.answers: Counter[int] = Counter()

    def ask(
        self, id: int, flags: int = 0, *, owner: int = 1, rows: int = 1, deadline: float | None = None
    ) -> int:
        request = ev.Request(next(self._ids), KEY, 0, rows, deadline)
        sequence, verdicts = self.sequences.request(request, (id, owner, flags), self.limit, self.now)
        if sequence is not None:
            self.waiting[request.id] = sequence
        self.take(verdicts)
        return request.id

    def take(self, verdicts: Verdicts) -> None:
        for request in verdicts.granted:
            self.executing[request.id] = self.waiting.pop(request.id)
        for refusal in verdicts.refused:
            self.refused[refusal.request] = refusal.status, refusal.text
            self.answers[refusal.request] += 1
            if refusal.request in self.waiting:
                sequence = self.waiting.pop(refusal.request)
                self.take(self.sequences.done(sequence, executed=False, now=self.now))
        for id in verdicts.cancelled:
            self.finish(id, executed=False)

    def finish(self, id: int, *, executed: bool = True) -> None:
        """End a request that was executed or cancelled."""
        sequence = self.executing.pop(id, None) or self.waiting.pop(id)
        self.answers[id] += 1
        self.take(self.sequences.done(sequence, executed=executed, now=self.now))

    def run(self, id: int, flags: int = 0) -> None:
        """Send a request that is executed at once."""
        self.finish(self.ask(id, flags))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.sequences.expire(self.now))

    def check(self) -> None:
        slots = [sequence.slot for sequence in self.live() if sequence.slot is not None]
        assert len(slots) == len(set(slots)) <= self.slots
        free = self.sequences._models[KEY].free
        assert sorted([*slots, *free]) == list(range(self.slots)), "slots are taken or free, each once"
        assert all(
            sequence.slot is not None and sequence.tensors.live for sequence in self.executing.values()
        )
        assert set(self.answers.values()) <= {1}

    def live(self) -> Iterator[SequenceEntry]:
        yield from self.sequences._models[KEY].sequences.values()

    def count(self, state: SequenceState) -> int:
        return self.sequences.count(KEY)[state]


def test_a_sequence_keeps_its_slot_from_start_to_end() -> None:
    """Steps of several sequences are executed at the same time, each in its slot.

    After an end, another sequence gets the slot.
    """
    house = House()
    first, second = house.ask(7, START), house.ask(8, START)
    rows = [house.executing[id].row for id in (first, second)]
    assert [row.begins for row in rows] == [True, True]
    house.finish(second)
    house.finish(first)
    again = house.executing[house.ask(7)].row
    assert again == rows[0]._replace(begins=False)
    house.run(8, END)
    assert house.executing[house.ask(9, START)].row.slot == rows[1].slot
    house.check()


@pytest.mark.parametrize(
    ("id", "flags", "rows", "status", "text"),
    [
        (0, START, 1, Status.INVALID, "each request belongs to a sequence"),
        (7, START, 2, Status.INVALID, "has one row, and this one has 2"),
        (7, 0, 1, Status.SEQUENCE_LOST, "start it again"),
        (7, END, 1, Status.SEQUENCE_LOST, "start it again"),
        (1, 0, 1, Status.INVALID, "has a request in progress"),
        (1, START, 1, Status.INVALID, "has a request in progress"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(
    id: int, flags: int, rows: int, status: Status, text: str
) -> None:
    """A request with a missing, unknown or busy id is refused and changes nothing."""
    house = House()
    house.ask(1, START)
    refused = house.refused[house.ask(id, flags, rows=rows)]
    assert refused[0] is status
    assert text in refused[1]
    assert [sequence.id for sequence in house.live()] == [1]
    house.check()


def test_a_second_end_is_of_no_sequence() -> None:
    """After its END, a sequence is unknown until it starts again. A second END is refused."""
    house = House()
    house.run(7, START | END)
    assert house.refused[house.ask(7, END)][0] is Status.SEQUENCE_LOST
    house.run(7, START)


def test_a_live_sequence_may_begin_again() -> None:
    """START of a live sequence begins it again in the same slot, as in Triton."""
    house = House()
    house.run(7, START)
    row = house.executing[house.ask(7, START)].row
    assert row.begins
    assert [sequence.slot for sequence in house.live()] == [row.slot]


def test_further_sequences_wait_in_turn() -> None:
    """With `wait`, starts get slots in the order of arrival. A start that is cancelled loses its turn."""
    house = House(slots=1)
    house.run(1, START)
    second, third, fourth = house.ask(2, START), house.ask(3, START), house.ask(4, START)
    house.finish(third, executed=False)
    assert list(house.executing) == []
    house.run(1, END)
    assert list(house.executing) == [second]
    house.finish(second)
    house.run(2, END)
    assert list(house.executing) == [fourth]
    house.check()


def test_so_many_wait_and_no_more() -> None:
    """If the queue is full, a start is refused. The error has the time until an idle sequence may expire."""
    house = House(slots=1, limit=1)
    house.run(1, START)
    house.now = 4.0
    house.ask(2, START)
    status, text = house.refused[house.ask(3, START)]
    assert status is Status.QUEUE_FULL
    assert "retry after 6.0 s" in text


def test_a_start_is_refused_where_none_may_wait() -> None:
    """With `refuse`, a start without a free slot is refused at once."""
    house = House(slots=1, when_full="refuse")
    house.ask(1, START)
    assert house.refused[house.ask(2, START)] == (
        Status.QUEUE_FULL,
        "all 1 slots for sequences of this model are in use; retry later",
    )
    house.check()


def test_before_the_end_of_the_runtime_no_sequence_gets_a_slot() -> None:
    """While the runtime prepares to end, no new sequence gets a slot, even if one is free.

    A sequence that has a slot continues. If the runtime does not end after all, the waiting sequences get their slots.
    """
    house = House(when_full="refuse")
    house.run(7, START)
    house.take(house.sequences.hold(held=True))
    later = house.ask(8, START)
    assert house.executing.keys() == {house.ask(7)}
    assert house.waiting.keys() == {later}

    house.take(house.sequences.hold(held=False))
    assert later in house.executing
    house.check()


def test_the_least_recently_used_sequence_goes_to_the_host() -> None:
    """With `host`, an idle sequence gives up its slot to another sequence. For its next step, it gets a slot again."""
    house = House(slots=2, when_full="host")
    house.run(1, START)
    house.run(2, START)
    house.run(1)
    taken = house.executing[house.ask(3, START)].row
    assert [sequence.id for sequence in house.live() if sequence.state is SequenceState.STORED] == [2]
    row = house.executing[house.ask(2)].row
    assert not row.begins
    assert row.slot != taken.slot
    # Both slots are in use, so this step waits for the first slot that is idle.
    waits = house.ask(1)
    assert waits in house.waiting
    house.finish(min(house.executing))
    assert house.executing[waits].row.slot == taken.slot
    house.check()


def test_an_idle_sequence_expires() -> None:
    """A sequence ends if it has no request for the timeout, on the device or on the host.

    Each step begins the timeout again.
    """
    house = House(slots=1, when_full="host")
    house.run(1, START)
    house.run(2, START)
    assert house.sequences.due() == TIMEOUT_S
    house.pass_time(6.0)
    house.run(2)
    house.pass_time(TIMEOUT_S - 6.0)
    assert [sequence.id for sequence in house.live()] == [2]
    house.pass_time(6.0)
    assert not house.sequences
    assert house.refused[house.ask(2)][0] is Status.SEQUENCE_LOST
    house.check()


def test_a_request_expires_while_it_waits_for_a_slot() -> None:
    """A request that waits for a slot ends at its deadline. If its sequence had begun before, the sequence keeps its state."""
    house = House(slots=1, when_full="host")
    house.run(1, START)
    house.ask(2, START)
    old, new = house.ask(1, deadline=3.0), house.ask(3, START, deadline=2.0)
    assert house.sequences.due() == 2.0
    house.pass_time(3.0)
    assert [house.refused[id][0] for id in (old, new)] == [Status.DEADLINE, Status.DEADLINE]
    assert {sequence.id: sequence.state.value for sequence in house.live()} == {1: "stored", 2: "stepping"}
    house.check()


def test_a_start_that_did_not_execute_leaves_no_sequence() -> None:
    """If the first step of a sequence is refused or cancelled, the sequence is removed.

    If a later step is refused or cancelled, the sequence stays as it was.
    """
    house = House()
    house.finish(house.ask(1, START), executed=False)
    assert not house.sequences
    house.run(1, START)
    house.finish(house.ask(1, END), executed=False)
    house.finish(house.ask(1, START), executed=False)
    assert not house.executing[house.ask(1)].row.begins
    house.check()


def test_a_closed_connection_ends_its_sequences() -> None:
    """If a connection closes, its idle sequences end at once, and its busy ones after their request. Others stay."""
    house = House(slots=3)
    house.finish(house.ask(1, START, owner=1))
    house.finish(house.ask(2, START, owner=2))
    busy = house.ask(3, START, owner=1)
    house.take(house.sequences.leave(1))
    assert [sequence.id for sequence in house.live()] == [2, 3]
    house.finish(busy)
    assert [sequence.id for sequence in house.live()] == [2]
    house.check()


def test_a_sequence_ends_with_the_connection_of_its_latest_request() -> None:
    """A sequence ends with the connection of its latest request. A front may have closed earlier connections."""
    house = House()
    house.finish(house.ask(1, START, owner=1))
    house.finish(house.ask(1, owner=2))

    house.take(house.sequences.leave(1))
    assert [sequence.id for sequence in house.live()] == [1]

    house.take(house.sequences.leave(2))
    assert not [*house.live()]
    house.check()


def test_lost_state_ends_every_sequence_that_had_some() -> None:
    """If the states are lost, all sequences that had a state end, even if they have a waiting or queued request.

    A waiting start gets a slot.
    """
    house = House(slots=1, when_full="host")
    house.run(1, START)
    queued = house.ask(2, START)
    stored, starting = house.ask(1), house.ask(3, START)
    house.take(house.sequences.lose(KEY, 1))
    assert house.refused[stored][0] is Status.SEQUENCE_LOST
    assert house.answers[queued] == 1
    assert list(house.executing) == [starting]
    house.take(house.sequences.lose(KEY, 1))
    house.finish(starting)
    assert [sequence.id for sequence in house.live()] == [3]
    house.check()


def test_steps_go_on_with_what_was_and_starts_do_not() -> None:
    """A step of a live sequence counts as accepted before a pause, so mode drain executes it. A new start does not count."""
    house = House()
    house.run(7, START)
    assert [house.executing[house.ask(7, flags)].request.accepted for flags in (0,)] == [True]  # type: ignore[union-attr]
    first = house.executing[house.ask(8, START)].request
    assert first is not None
    assert not first.accepted


def test_a_start_that_waits_for_a_slot_outlasts_a_pause() -> None:
    """A start that waited before the pause is accepted, so mode drain executes it. A later start is not."""
    house = House(slots=1)
    house.run(7, START)
    early = house.ask(8, START)
    house.sequences.accept([KEY, "another model"])
    late = house.ask(9, START)
    house.run(7, END)
    assert house.executing[early].request.accepted  # type: ignore[union-attr]
    house.finish(early)
    house.run(8, END)
    assert not house.executing[late].request.accepted  # type: ignore[union-attr]


def test_the_longest_idle_make_room_in_host_memory() -> None:
    """To free host memory, sequences end in the order of their last use.

    A stored state takes host memory. The state of an idle sequence with a slot does so only if its model is not on the device.
    """
    house = House(slots=1, when_full="host")
    for id in (1, 2, 3):
        house.run(id, START)
        house.pass_time(1)
    sequences, nbytes = house.sequences, 32
    assert sequences.host_bytes({KEY}) == 2 * nbytes
    assert sequences.host_bytes(()) == 3 * nbytes
    house.take(sequences.drop(1, {KEY}))
    assert [sequence.id for sequence in house.live()] == [2, 3]
    house.take(sequences.drop(10 * nbytes, {KEY}))
    assert [sequence.id for sequence in house.live()] == [3]
    house.take(sequences.drop(1, ()))
    assert not sequences
    house.run(4, START)
    house.check()


def test_sequences_of_a_model_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has a maximum number of sequences, so that states on the host cannot grow without limit."""
    monkeypatch.setattr("rsrv.runtime.sequences.MAX_SEQUENCES", 3)
    house = House(slots=1, when_full="host")
    for id in (1, 2, 3):
        house.run(id, START)
    status, text = house.refused[house.ask(4, START)]
    assert status is Status.QUEUE_FULL
    assert "3 sequences" in text


EVENTS = st.tuples(
    st.sampled_from(["ask"] * 6 + ["finish"] * 4 + ["cancel", "time", "leave", "lose"]),
    st.integers(1, 6),
    st.sampled_from([0, 0, START, START, END, START | END]),
    st.integers(0, 2),
)


@given(st.sampled_from(["wait", "refuse", "host"]), st.integers(1, 3), st.lists(EVENTS, max_size=80))
def test_any_course_keeps_slots_and_answers_apart(
    when_full: WhenFull, slots: int, course: list[tuple[str, int, int, int]]
) -> None:
    """After any events, no slot serves two sequences, each request ends once, and all sequences and slots are released."""
    house = House(slots, when_full, limit=3)
    ids, losses = list[int](), 0
    for event, id, flags, owner in course:
        match event:
            case "ask":
                deadline = house.now + 5.0 if owner == 2 else None
                ids.append(house.ask(id, flags, owner=owner, deadline=deadline))
            case "finish" if house.executing:
                house.finish(sorted(house.executing)[id % len(house.executing)], executed=flags != START)
            case "cancel" if house.waiting:
                house.finish(sorted(house.waiting)[id % len(house.waiting)], executed=False)
            case "time":
                house.pass_time(float(id))
            case "leave":
                for number in [n for n, sequence in house.waiting.items() if sequence.owner == owner]:
                    house.finish(number, executed=False)
                house.take(house.sequences.leave(owner))
            case "lose":
                losses += 1
                house.take(house.sequences.lose(KEY, losses))
        house.check()
        assert not (house.waiting and house.sequences._models[KEY].free), "nobody waits for a free slot"
    while house.executing or house.waiting:
        house.finish(min({**house.executing, **house.waiting}), executed=True) if house.executing else None
        house.pass_time(TIMEOUT_S)
        house.check()
    house.pass_time(TIMEOUT_S)
    assert not house.sequences
    assert house.answers == Counter(ids)
