"""The process that renders chat templates. It has limits, because even a short template can use any amount of time and memory.

A message is a line of JSON. A request has `template`, `variables`, `messages` and `most`, the maximum number of characters of the
prompt. The answer has `prompt` or `error`. An empty line says that the process has started.
"""

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Maximum number of bytes of the process's memory.
MAX_MEMORY: Final = 512 << 20
#: Maximum number of CPU seconds for one template. The parent process usually stops a slow template earlier.
MAX_CPU_S: Final = 10


def render(
    template: str, variables: Mapping[str, str], messages: Sequence[Mapping[str, str]], most: int
) -> str:
    """Return the prompt. Raises TemplateError if it has more than `most` characters, and any error of the template."""
    prompt = ""
    for part in _template(template).generate(messages=messages, add_generation_prompt=True, **variables):
        prompt += part
        if len(prompt) > most:
            raise TemplateError(f"the prompt has more than {most:,} characters")
    return prompt


@lru_cache(maxsize=64)
def _template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(
        raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form)
    )
    return environment.from_string(source)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def answer(request: Any) -> dict[str, str]:
    """Return the answer to a request."""
    try:
        return {"prompt": render(**request)}
    except MemoryError:
        return {"error": f"the template needs more than {MAX_MEMORY >> 20} MiB"}
    except Exception as error:  # noqa: BLE001  a template may fail in any way
        return {"error": f"{error!s:.200}" or type(error).__name__}


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    for request in requests:
        # Limit the CPU time, so that an endless template ends even if the parent process has died and cannot stop it.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + MAX_CPU_S)
        text = json.dumps(answer(json.loads(request)), ensure_ascii=False)
        answers.write(text.encode(errors="replace") + b"\n")
        answers.flush()


def _limit(resource_kind: int, most: int) -> None:
    """Limit a resource of this process. A lower hard limit stays in force."""
    _, hard = resource.getrlimit(resource_kind)
    resource.setrlimit(resource_kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    _limit(resource.RLIMIT_AS, MAX_MEMORY)
    print(flush=True)
    serve(sys.stdin.buffer, sys.stdout.buffer)
