"""Which model goes next."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.scheduler.disciplines import Fifo
from rsrv.runtime.scheduler.waiting import Place


@dataclass
class Model:
    """A candidate by itself."""

    name: str
    place: Place | None
    weight: float = 1.0
    turn_seconds: float = 0.001


def test_nobody_waits() -> None:
    """Without candidates there is no choice."""
    assert Fifo().choose(0.0) is None


def test_oldest_first_request_goes_first() -> None:
    """Arrival decides, not the order in which the candidates became known."""
    fifo = Fifo()
    fifo.update(Model("young", (1, 9)), 0.0)
    fifo.update(Model("old", (1, 3)), 0.0)

    assert fifo.choose(0.0) == "old"


def test_committed_work_goes_before_older_work() -> None:
    """Level 0 comes before level 1, whatever the age."""
    fifo = Fifo()
    fifo.update(Model("old", (1, 3)), 0.0)
    fifo.update(Model("meta", (0, 9)), 0.0)

    assert fifo.choose(0.0) == "meta"


def test_model_that_lost_its_work_is_not_chosen() -> None:
    """A removed candidate, or one without a place, is out at once."""
    fifo = Fifo()
    model = Model("a", (1, 1))
    fifo.update(model, 0.0)
    fifo.update(Model("b", (1, 2)), 0.0)
    model.place = None
    fifo.update(model, 0.0)

    assert fifo.choose(0.0) == "b"
    fifo.remove("b")
    fifo.remove("never seen")
    assert fifo.choose(0.0) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.none() | st.tuples(st.integers(0, 1), st.integers(0, 1000))),
        max_size=300,
    )
)
def test_choice_is_the_smallest_place(changes: list[tuple[int, Place | None]]) -> None:
    """After any changes the choice is the minimum over the candidates, and the index stays small."""
    fifo = Fifo()
    places: dict[str, Place] = {}
    for number, place in changes:
        name = f"m{number}"
        fifo.update(Model(name, place), 0.0)
        places.pop(name, None)
        if place is not None:
            places[name] = place
        chosen = fifo.choose(0.0)

        assert (chosen is None) == (not places)
        assert chosen is None or places[chosen] == min(places.values())
        assert len(fifo._heap) <= 80
