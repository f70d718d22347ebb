"""Which tensors belong together: those that exactly the same loaded models have.

Tensors are known by their content, and models that have equal ones share their bytes. Sums over a model's
pieces cost far less than sums over its tensors: a model that shares nothing is one piece, and a family of
fine-tunes with one backbone has two for each member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rsrv.scheduler.errors import CallerError

if TYPE_CHECKING:
    from rsrv.scheduler.weights import Holding


class Piece:
    """Tensors that exactly the same loaded models have. They are on the device while one of these uses them."""

    __slots__ = ("bytes", "owners", "pins", "tensors", "users")

    def __init__(self, tensors: dict[Any, int], size: int, owners: list[Holding]) -> None:
        #: key -> bytes; empty for the weights of a model whose tensors nobody told.
        self.tensors = tensors
        self.bytes = size
        self.owners = owners
        #: owners whose weights are resident or on their way, and those of them that are pinned.
        self.users = 0
        self.pins = 0


class Pieces:
    """The pieces of all models whose tensors are known."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        #: tensor -> the piece that it belongs to.
        self._of: dict[Any, Piece] = {}

    def check(self, tensors: Mapping[Any, int]) -> None:
        """Refuse tensors that contradict those of other models.

        Raises:
            CallerError: a tensor has another size.
        """
        for key, size in tensors.items():
            piece = self._of.get(key)
            if piece is not None and piece.tensors[key] != size:
                raise CallerError(f"tensor {key!r} has {size} bytes here and {piece.tensors[key]} elsewhere")

    def join(self, holding: Holding, tensors: Mapping[Any, int]) -> None:
        """Divide the tensors of a model that has none yet among its pieces. Costs O(tensors)."""
        fresh: dict[Any, int] = {}
        common: dict[Piece, dict[Any, int]] = {}
        for key, size in tensors.items():
            piece = self._of.get(key)
            (fresh if piece is None else common.setdefault(piece, {}))[key] = size
        for piece, some in common.items():
            whole = len(some) == len(piece.tensors)
            shared = piece if whole else self._split(piece, some)
            shared.owners.append(holding)
            holding.pieces.append(shared)
        if fresh:
            own = Piece(fresh, sum(fresh.values()), [holding])
            self._of.update(dict.fromkeys(fresh, own))
            holding.pieces.append(own)

    def _split(self, piece: Piece, tensors: dict[Any, int]) -> Piece:
        """Make some of a piece's tensors a piece of their own."""
        part = Piece(tensors, sum(tensors.values()), list(piece.owners))
        part.users, part.pins = piece.users, piece.pins
        piece.bytes -= part.bytes
        for key in tensors:
            del piece.tensors[key]
            self._of[key] = part
        for owner in part.owners:
            owner.pieces.append(part)
        return part

    def leave(self, holding: Holding) -> None:
        """Forget the tensors of a model that is gone, and uses none."""
        for piece in holding.pieces:
            piece.owners.remove(holding)
            if not piece.owners:
                for key in piece.tensors:
                    del self._of[key]

    def by_tensor(self) -> Mapping[Any, Piece]:
        """Each tensor's piece."""
        return self._of
