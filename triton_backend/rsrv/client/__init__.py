"""A client for data sets: one deadline per request, repetitions as rsrv's servers want them, and as many requests in flight as help.

It needs the extra `client`: tritonclient and numpy.
"""

from rsrv.client.client import AsyncClient, Client, Outputs
from rsrv.client.errors import InputError, RequestError

__all__ = ["AsyncClient", "Client", "InputError", "Outputs", "RequestError"]
