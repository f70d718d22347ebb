"""A client for data sets. Each request has one deadline.

The client retries when the server asks for it, and adapts the number of requests in flight to the throughput.

It needs the extra `client`: tritonclient and numpy.
"""

from rsrv.client.client import AsyncClient, Client, Outputs
from rsrv.client.errors import InputError, RequestError

__all__ = ["AsyncClient", "Client", "InputError", "Outputs", "RequestError"]
