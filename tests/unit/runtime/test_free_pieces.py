"""Free pieces of a GPU's allocator, derived from what is allocated."""

from random import Random

from rsrv.runtime.free_pieces import FreePieces

MIB = 1 << 20
#: Address of the first byte of the arena.
START = 1 << 40


def test_a_new_arena_has_room_for_all_of_its_bytes() -> None:
    """In a new arena, sizes are rounded up to 256 bytes, and an allocation of no bytes needs no room."""
    pieces = FreePieces(START, 1024)

    assert pieces.fits([1000])
    assert pieces.fits([1, 1, 1, 1, 0])
    assert not pieces.fits([257, 257, 1])
    assert not pieces.fits([1, 1, 1, 1, 1])


def test_two_pieces_are_no_room_for_one_allocation() -> None:
    """Two separate free pieces have no room for one allocation. A freed piece joins its free neighbours."""
    pieces = FreePieces(START, 300 * MIB)
    for key in range(3):
        pieces.add(key, START + key * 100 * MIB, 100 * MIB)
    assert not pieces.fits([1])

    pieces.remove(0)
    pieces.remove(2)
    assert pieces.fits([100 * MIB, 100 * MIB])
    assert not pieces.fits([200 * MIB])

    pieces.remove(1)
    pieces.remove(1)
    assert pieces.fits([300 * MIB])


def test_a_small_rest_is_lost_with_its_piece() -> None:
    """XLA splits a piece only if the rest has at least 128 MiB, or is at least as large as the allocation.

    A smaller rest is lost with its piece.
    """
    pieces = FreePieces(START, 330 * MIB)

    assert pieces.fits([202 * MIB, 128 * MIB])
    assert pieces.fits([165 * MIB, 165 * MIB])
    assert not pieces.fits([210 * MIB, 100 * MIB])

    pieces.add(0, START, 210 * MIB)
    assert not pieces.fits([1])
    pieces.remove(0)
    pieces.add(0, START, 202 * MIB)
    assert pieces.fits([128 * MIB])


def test_the_best_piece_is_taken_and_the_largest_allocation_first() -> None:
    """An allocation gets the smallest piece that is large enough, so a large piece stays free for a large tensor, in any order."""
    pieces = FreePieces(START, 400 * MIB)
    pieces.add(0, START + 50 * MIB, 150 * MIB)

    assert pieces.fits([50 * MIB, 200 * MIB])
    assert pieces.fits([200 * MIB, 50 * MIB])
    assert not pieces.fits([200 * MIB, 50 * MIB, 1])


def test_what_lay_between_two_weights_and_is_freed_is_known_once_a_weight_takes_its_place() -> None:
    """Memory between two weights counts as a part of the first one, until another weight was there and was removed.

    Free memory that an execution used looks the same as a rest that was not split off.
    """
    pieces = FreePieces(START, 300 * MIB)
    pieces.add(1, START + 150 * MIB, 150 * MIB)
    pieces.add(0, START, 100 * MIB)
    assert not pieces.fits([1])

    pieces.add(2, START + 100 * MIB, 50 * MIB)
    pieces.remove(2)
    assert pieces.fits([50 * MIB])
    pieces.remove(0)
    pieces.remove(1)
    assert pieces.fits([300 * MIB])


def test_an_allocation_outside_of_the_arena_changes_nothing() -> None:
    """An allocation outside of the arena changes nothing, because the allocator may have another range, whose pieces are unknown."""
    pieces = FreePieces(START, 100 * MIB)
    pieces.add(0, START - MIB, MIB)
    pieces.add(1, START + 100 * MIB, MIB)

    assert pieces.fits([100 * MIB])
    pieces.remove(0)
    pieces.remove(1)
    assert pieces.fits([100 * MIB])


def test_the_pieces_follow_an_allocator_that_loads_and_evicts_at_random() -> None:
    """The pieces match an allocator that takes the smallest sufficient piece and joins freed pieces with their free neighbours."""
    random = Random(3)
    pieces = FreePieces(START, 4096 * MIB)
    free, taken = {START: 4096 * MIB}, dict[int, tuple[int, int]]()
    for key in range(3000):
        nbytes = random.choice((1, 10, 100, 400)) * random.randint(1, MIB)
        needed = -(-nbytes // 256) * 256
        fitting = [(size, address) for address, size in free.items() if size >= needed]
        assert pieces.fits([nbytes]) is bool(fitting)
        if fitting and random.random() < 0.6:
            size, address = min(fitting)
            rest = size - needed
            split = rest >= min(needed, 128 * MIB)
            del free[address]
            if split:
                free[address + needed] = rest
            taken[key] = address, needed if split else size
            pieces.add(key, address, nbytes)
        elif taken:
            gone = random.choice([*taken])
            address, size = taken.pop(gone)
            pieces.remove(gone)
            for before in [start for start in free if start + free[start] == address]:
                address, size = before, free.pop(before) + size
            free[address] = size + free.pop(address + size, 0)
