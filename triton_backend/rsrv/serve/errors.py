"""What is wrong with what a node was told to do."""


class NodeError(Exception):
    """The node cannot start; the message names the setting and says what to do."""
