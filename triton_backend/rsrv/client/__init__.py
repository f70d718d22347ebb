"""A client for single requests and for data sets. A request has one deadline for all its attempts.

The client retries a request when the server asks for a retry, and adapts the number of requests in flight to the throughput.

It needs the extra `client`: tritonclient and numpy.
"""

from rsrv.client.client import AsyncClient, Client, Outputs
from rsrv.client.errors import InputError, RequestError

__all__ = ["AsyncClient", "Client", "InputError", "Outputs", "RequestError"]
