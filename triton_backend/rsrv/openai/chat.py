"""The prompt of a chat: its messages, put together by the tokenizer's chat template."""

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from rsrv.hooks.text import CONTENT_BEGIN, CONTENT_END
from rsrv.openai.errors import ApiError, invalid

#: Maximum number of seconds for rendering a template.
MAX_TEMPLATE_S: Final = 1.0
#: Maximum number of characters of a prompt.
MAX_PROMPT: Final = 4_000_000
#: Maximum number of bytes of the process's answer, which is JSON. An escaped character takes six bytes there.
_MAX_ANSWER = 8 * MAX_PROMPT
#: Seconds within which the process that renders templates must start.
_START_S = 60.0
_MARKS = re.compile(f"[{CONTENT_BEGIN}{CONTENT_END}]")
#: Matches a prompt in which the delimiters alternate: each CONTENT_BEGIN is followed by a CONTENT_END.
_PAIRS = re.compile(
    f"[^{CONTENT_BEGIN}{CONTENT_END}]*(?:{CONTENT_BEGIN}[^{CONTENT_BEGIN}{CONTENT_END}]*{CONTENT_END}"
    f"[^{CONTENT_BEGIN}{CONTENT_END}]*)*"
)


class ChatTemplates:
    """Renders chat templates in a separate process, one at a time. Only one event loop may use it."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._free = asyncio.Lock()

    async def prompt(self, chat: Mapping[str, str], messages: Sequence[Mapping[str, str]]) -> str:
        """Return the prompt, with delimiters around the contents that the client has written.

        Special tokens between these delimiters are plain text for the tokenizer.

        Args:
            chat: The Jinja template, as `template`, and texts that it uses, such as `bos_token`.
            messages: Mappings with `role`, `content` and perhaps `name`.

        Raises:
            ApiError: The template refuses the messages, takes too long or makes too long a prompt.
        """
        marked = [_marked(index, message) for index, message in enumerate(messages)]
        if sum(len(text) for message in messages for text in message.values()) > MAX_PROMPT:
            raise invalid(f"the messages have more than {MAX_PROMPT:,} characters together", "messages")
        variables = {name: text for name, text in chat.items() if name != "template"}
        request = {
            "template": chat["template"],
            "variables": variables,
            "messages": marked,
            "most": MAX_PROMPT,
        }
        answer = await self._ask(json.dumps(request, ensure_ascii=False).encode())
        if "error" in answer:
            raise invalid(f"the chat template refuses the messages: {answer['error']}", "messages")
        prompt: str = answer["prompt"]
        if not _PAIRS.fullmatch(prompt):
            raise invalid("the chat template cuts a message in two, which is not supported", "messages")
        return prompt

    async def _ask(self, request: bytes) -> Any:
        async with self._free:
            process = self._process or await self._start()
            # If the whole answer cannot be read, the process is killed below, and the next request starts another process.
            self._process = None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(MAX_TEMPLATE_S):
                    process.stdin.write(request + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readuntil()
                self._process = process
            except TimeoutError:
                raise invalid(
                    f"the chat template takes more than {MAX_TEMPLATE_S:g} s for these messages", "messages"
                ) from None
            except (EOFError, ConnectionError):
                raise ApiError(500, "INTERNAL", "the process that renders chat templates has ended") from None
            finally:
                if self._process is None:
                    _kill(process)
            return json.loads(line)

    async def _start(self) -> Process:
        words = (sys.executable, "-P", "-m", "rsrv.openai.template_process")
        process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, limit=_MAX_ANSWER)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                await process.stdout.readuntil()
        except (TimeoutError, EOFError):
            _kill(process)
            raise ApiError(
                500, "INTERNAL", "the process that renders chat templates does not start"
            ) from None
        except BaseException:
            _kill(process)
            raise
        return process

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _kill(self._process)
            await self._process.wait()


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def _marked(index: int, message: Mapping[str, str]) -> dict[str, str]:
    """Return a message with delimiters around its content.

    Blanks at both ends of the content stay outside of the delimiters, because templates may remove these blanks.
    """
    content = message["content"]
    if any(_MARKS.search(text) for text in message.values()):
        raise invalid("U+FDD0 and U+FDD1 are not characters of a text", f"messages[{index}]")
    core = content.strip()
    if not core:
        return dict(message)
    begin = content.index(core)
    marked = f"{content[:begin]}{CONTENT_BEGIN}{core}{CONTENT_END}{content[begin + len(core) :]}"
    return {**message, "content": marked}
