"""Requests from the form of the live page. They go through the HTTP port of the server's own tritonserver."""

import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from aiohttp import ClientError, ClientSession, ClientTimeout
from yarl import URL

from rsrv.live.source import PageError

#: Seconds that the model has to answer.
_TIMEOUT_S = 30.0
#: Maximum number of bytes of the answer.
_MAX_ANSWER = 1 << 18


async def infer(address: str, model: str, inputs: Any) -> tuple[int, str]:
    """Send a request of the page to a known model. Return the HTTP status and the text of the answer.

    Args:
        address: HOST:PORT of tritonserver's HTTP front end. Empty: it has none.
        model: The model's name.
        inputs: JSON from a client: objects with name, datatype, shape, and data as a flat list.

    Raises:
        PageError: The request is wrong, cannot be sent, or is not answered.
    """
    body = json.dumps({"inputs": _checked(inputs)})
    if not address:
        raise PageError(
            409, "tritonserver was started with --allow-http=false, but this form needs its HTTP port"
        )
    url = URL(f"http://{address}/v2/models/{quote(model, safe='')}/infer", encoded=True)
    try:
        # Use no proxy and follow no redirection, so that the request goes to this tritonserver.
        async with (
            ClientSession(timeout=ClientTimeout(_TIMEOUT_S), trust_env=False) as session,
            session.post(url, data=body, allow_redirects=False) as answer,
        ):
            text = b""
            async for some in answer.content.iter_any():
                text += some
                if len(text) > _MAX_ANSWER:
                    raise PageError(
                        502,
                        f"the answer has more than {_MAX_ANSWER >> 10} kB: send the request with the command on the page",
                    )
            return answer.status, text.decode(errors="replace")
    except TimeoutError:
        raise PageError(504, f"no answer within {_TIMEOUT_S:g} s") from None
    except (ClientError, OSError) as error:
        raise PageError(502, f"tritonserver does not answer at {address}: {error}") from None


def _checked(inputs: Any) -> list[Mapping[str, Any]]:
    """Return inputs with only the known fields, so that a client cannot name shared memory. Raises PageError.

    The number of values must match the shape: Triton 24.10 allocates memory for the shape before it reads the values, and
    crashes if there is not enough memory.
    """
    tensors: list[Mapping[str, Any]] = []
    for tensor in inputs if isinstance(inputs, list) else ():
        match tensor:
            case {"name": str(name), "datatype": str(datatype), "shape": list(shape), "data": list(data)}:
                if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) != len(
                    data
                ):
                    raise PageError(
                        400, f"{name:.80}: the shape {shape!s:.80} does not fit {len(data)} values"
                    )
                if not all(isinstance(value, (bool, int, float, str)) for value in data):
                    raise PageError(400, f"{name:.80}: the values must be numbers or texts")
                tensors.append({"name": name, "datatype": datatype, "shape": shape, "data": data})
    if not tensors or len(tensors) != len(inputs):
        raise PageError(400, "inputs must be objects with name, datatype, shape and data")
    return tensors
