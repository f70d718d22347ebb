"""The errors of the client."""

from rsrv.client.retries import Failure


class InputError(ValueError):
    """The inputs do not fit the model. Nothing was sent."""


class RequestError(Exception):
    """The request has failed. The text has the server's reason."""

    def __init__(self, model: str, failure: Failure, attempts: int, why: str = "") -> None:
        count = f" after {attempts} attempts" if attempts > 1 else ""
        more = f" ({why})" if why else ""
        super().__init__(f"{model}: {failure.text}{count}{more}")
        self.failure = failure
        self.attempts = attempts
        #: The data set's rows in the request: the first row, and the row after the last one.
        self.rows: tuple[int, int] | None = None

    def add_rows(self, start: int, stop: int) -> None:
        """Record which rows of the data set the request had, and name these rows at the beginning of the text."""
        self.rows = start, stop
        self.args = (f"rows {start} to {stop - 1}: {self}",)

    @property
    def tag(self) -> str:
        """The tag of rsrv's error, such as QUEUE_FULL, or an empty text."""
        return self.failure.tag
