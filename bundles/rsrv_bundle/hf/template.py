"""Render untrusted chat templates: in jinja2's sandbox, in a separate process with limits on time, memory and text."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rsrv_bundle.errors import BundleError

#: Maximum number of characters of a template.
MAX_SOURCE = 256 * 1024
#: Maximum number of characters of a prompt around a question.
MAX_TEXT = 16_384
#: Maximum number of CPU seconds.
MAX_SECONDS = 1
#: Maximum number of bytes of the process's memory.
MAX_BYTES = 512 * 2**20
#: Kill the process after this many seconds, even if a busy machine has given it no processor time.
_PATIENCE_S = 60
#: Place of the client's text in a template of the manifest.
TEXT: Final = "{text}"
_WHERE: Final = "chat_template"
_SIMPLER: Final = "give the directory a simpler template, or none"


def prompt_template(source: str, special: Mapping[str, str]) -> str:
    """Return the prompt of one question as the manifest writes it, with `{text}` in place of the question.

    source: a chat template. special: texts that it may use, such as bos_token. Raises BundleError for a
    template that fails, exceeds a limit, or changes the question.
    """
    (text,) = prompts(source, special, [TEXT])
    if text.count(TEXT) != 1:
        raise BundleError(
            f"{_WHERE}: contains the question {text.count(TEXT)} times, but must contain it once; {_SIMPLER}"
        )
    return text


def prompts(source: str, special: Mapping[str, str], questions: Sequence[str]) -> list[str]:
    """Return the prompts of questions. Raises BundleError for a template that fails, or exceeds a limit.

    A template may treat each question in another way, so the template is rendered for each question.
    """
    if len(source) > MAX_SOURCE:
        raise BundleError(f"{_WHERE}: has {len(source):,} characters; {MAX_SOURCE:,} are allowed: {_SIMPLER}")
    request = json.dumps({"source": source, "special": dict(special), "questions": list(questions)})
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=request.encode(),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BundleError(f"{_WHERE}: takes longer than {_PATIENCE_S} s; {_SIMPLER}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [
            f"ended by signal {-done.returncode}"
        ]
        raise BundleError(
            f"{_WHERE}: fails in jinja2's sandbox within {MAX_SECONDS} s and {MAX_BYTES >> 20} MB: {lines[-1]:.200}; {_SIMPLER}"
        )
    texts: list[str] = json.loads(done.stdout)
    if any(len(text) > MAX_TEXT + len(question) for text, question in zip(texts, questions, strict=True)):
        raise BundleError(f"{_WHERE}: makes more than {MAX_TEXT:,} characters around a question; {_SIMPLER}")
    return texts


def render(source: str, special: Mapping[str, str], questions: Sequence[str]) -> Iterator[str]:
    """Render a chat template for each question, with the settings of transformers."""
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = fail
    # A bundle would keep the date of the export as today's date.
    environment.globals["strftime_now"] = lambda _: fail(
        "the template asks for the date, which a bundle does not know"
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    template = environment.from_string(source)
    values: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
    for question in questions:
        yield template.render(messages=[{"role": "user", "content": question}], **values, **special)


def main() -> int:
    """Render the template on standard input within the limits, and write the prompts as JSON."""
    import resource

    # Import jinja2 before the limits are set, so that the import does not count.
    import jinja2.sandbox  # noqa: F401

    seconds = math.ceil(time.process_time()) + MAX_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    request = json.loads(sys.stdin.buffer.read())
    try:
        # Cut texts that are too long. The parent process still sees that they are too long, and refuses them.
        texts = [
            text[: MAX_TEXT + len(question) + 1]
            for text, question in zip(render(**request), request["questions"], strict=True)
        ]
    except MemoryError:
        print("it needs more memory", file=sys.stderr)
        return 1
    except Exception as e:  # noqa: BLE001 - a template may raise anything
        print(f"{type(e).__name__}: {e!s:.300}", file=sys.stderr)
        return 1
    print(json.dumps(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
