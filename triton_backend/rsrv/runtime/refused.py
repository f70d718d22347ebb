"""What an operator wants is not done."""


class Refused(Exception):
    """`code` is the name of a gRPC status; the message says why, and what to do."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
