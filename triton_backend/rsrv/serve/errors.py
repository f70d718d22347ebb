"""Error of a node that cannot start."""


class NodeError(Exception):
    """The node cannot start; the message names the setting and the remedy."""
