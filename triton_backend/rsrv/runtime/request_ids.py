"""Numbers of requests: numbers on one connection, the runtime's global ids, and the numbers that operators see."""

from rsrv.wire.frames import ProtocolError

#: A connection's own request ids stay below this value, so that (connection, id) fits into one number.
ID_BITS = 40
#: Maximum number of characters of a request's number.
_MAX_NUMBER = 32


def global_id(connection: int, request: int) -> int:
    """Return the global id of the request with this number on the connection with this number. Raises ProtocolError."""
    if request >> ID_BITS:
        raise ProtocolError(f"request id {request} has more than {ID_BITS} bits")
    return connection << ID_BITS | request


def request_number(id: int) -> str:
    """Return the number by which operators name a request, given its global id.

    It consists of the connection's number and the request's number on that connection (3.17). A step of a generation has only
    its own number (step.17).
    """
    return f"step.{-id}" if id < 0 else f"{id >> ID_BITS}.{own_number(id)}"


def own_number(id: int) -> int:
    """Return the number of a request on its connection, given its global id."""
    return id & (1 << ID_BITS) - 1


def parse_number(text: str) -> int | None:
    """Return the global id for a text of `request_number`. None: the text is not such a number."""
    connection, _, request = text.partition(".")
    if len(text) > _MAX_NUMBER or not (text.isascii() and request.isdigit()):
        return None
    if connection == "step":
        return -int(request)
    return int(connection) << ID_BITS | int(request) if connection.isdigit() else None
