"""Free pieces of a GPU's allocator, derived from what is allocated."""

from rsrv.runtime.free_pieces import FreePieces

MIB = 1 << 20
#: address of the arena's first byte
START = 1 << 40


def test_a_new_arena_has_room_for_all_of_its_bytes() -> None:
    """Sizes are rounded up to 256 bytes, and allocations of no bytes need no room."""
    pieces = FreePieces(START, 1024)

    assert pieces.fits([1000])
    assert pieces.fits([1, 1, 1, 1, 0])
    assert not pieces.fits([257, 257, 1])
    assert not pieces.fits([1, 1, 1, 1, 1])


def test_two_pieces_are_no_room_for_one_allocation() -> None:
    """What is freed is room again, together with its neighbours."""
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
    """XLA splits off a rest of 128 MiB, or one as large as the allocation."""
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
    """A large piece stays for a large tensor, whatever the order of the tensors."""
    pieces = FreePieces(START, 400 * MIB)
    pieces.add(0, START + 50 * MIB, 150 * MIB)

    assert pieces.fits([50 * MIB, 200 * MIB])
    assert pieces.fits([200 * MIB, 50 * MIB])
    assert not pieces.fits([200 * MIB, 50 * MIB, 1])
