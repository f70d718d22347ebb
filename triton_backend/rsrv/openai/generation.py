"""Completions and chats: the pieces of an answer, and their form as JSON objects and server-sent events."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from rsrv.hooks.text import TextStream
from rsrv.openai.bodies import ChatBody, CompletionsBody, DetokenizeBody, GenerationBody, TokenizeBody
from rsrv.openai.errors import ApiError, invalid
from rsrv.openai.inference import Value
from rsrv.openai.texts import ModelCall

#: A client's seed is reduced modulo this number, because the runtime accepts only smaller seeds.
_SEEDS = 1 << 24


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. The last one has a reason, `stop` or `length`."""

    text: str
    finish_reason: str | None = None


async def prompt_of(call: ModelCall[Any]) -> tuple[Value, bool]:
    """Return the prompt of a completion or a chat, and whether a chat template made it. Raises ApiError."""
    body, model = call.body, call.model
    if "ids" in model.inputs:
        text = f"{model.name} has no tokenizer, so its answers are not text; call it over KServe v2"
        raise invalid(text, "model")
    if messages := getattr(body, "messages", None):
        if model.chat:
            texts = [
                {
                    "role": message.role,
                    "content": message.text,
                    **({"name": message.name} if message.name else {}),
                }
                for message in messages
            ]
            return (await call.templates.prompt(model.chat, texts)).encode(), True
        if len(messages) != 1 or messages[0].role != "user":
            text = f"{model.name} has no chat template: send one message of the role user"
            raise invalid(text, "messages")
        prompt: str | list[int] = messages[0].text
    else:
        (prompt,) = body.prompt
    if not isinstance(prompt, str):
        raise invalid(f"{model.name} takes texts, not token ids", "prompt")
    encoded = prompt.encode()
    return (memoryview(encoded) if "bytes" in model.inputs else encoded), False


def parameters(body: GenerationBody, *, of_bytes: bool, chat: bool) -> dict[str, bool | int | str]:
    """Return the request's parameters. Numbers with a fraction are sent as texts, because the protocol has no type for them."""
    fields: dict[str, Any] = {
        # If the model's tokens are bytes, this process itself finds the stop texts. It needs a stream, to end the generation
        # at the first stop text.
        "stream": body.stream or (of_bytes and bool(body.stop)),
        "max_tokens": getattr(body, "max_completion_tokens", None) or body.max_tokens,
        "top_k": body.top_k,
        "temperature": None if body.temperature is None else str(body.temperature),
        "top_p": None if body.top_p is None else str(body.top_p),
        "seed": None if body.seed is None else body.seed % _SEEDS,
        "stop": json.dumps(body.stop) if body.stop and not of_bytes else None,
        "chat": True if chat else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


async def pieces(call: ModelCall[Any]) -> AsyncGenerator[Piece, None]:
    """Yield the answer's pieces, and count its tokens. Raises ApiError."""
    value, chat = await prompt_of(call)
    of_bytes = "bytes" in call.model.outputs
    fields = parameters(call.body, of_bytes=of_bytes, chat=chat)
    text = TextStream(_decode, call.body.stop)
    name = call.model.outputs["bytes" if of_bytes else "text"]
    count = 0
    async with aclosing(call.backend.stream(call.model, value, fields, call.terms)) as responses:
        async for outputs in responses:
            if of_bytes:
                tokens = outputs[name].tolist()
                count += len(tokens)
                piece = text.feed(tokens)
            else:
                piece = b"".join(outputs[name]).decode(errors="replace")
            if text.stopped:
                call.prompt_tokens, call.completion_tokens = len(value), count
                yield Piece(piece, "stop")
                return
            if "prompt_tokens" not in outputs:
                yield Piece(piece)
                continue
            call.prompt_tokens = int(outputs["prompt_tokens"][0])
            call.completion_tokens = int(outputs["completion_tokens"][0])
            # The stub of a model without a tokenizer sends no reason.
            reason = "length" if call.completion_tokens == fields.get("max_tokens") else "stop"
            if finish := outputs.get("finish_reason"):
                reason = finish[0].decode()
            yield Piece(piece + text.finish(), reason)
            return
    raise ApiError(502, "INTERNAL", "the answer has ended without its last response")


def _decode(tokens: Sequence[int]) -> str:
    """Return the text of tokens that are bytes."""
    if any(token > 255 for token in tokens):
        raise ApiError(
            500,
            "INTERNAL",
            "the model returned a token that is not a byte; its bundle gives that output the wrong role",
        )
    return bytes(tokens).decode(errors="replace")


async def whole(call: ModelCall[Any]) -> dict[str, Any]:
    """Return the whole answer as one object. Raises ApiError."""
    text, reason = "", None
    async with aclosing(pieces(call)) as parts:
        async for piece in parts:
            text, reason = text + piece.text, piece.finish_reason
    if isinstance(call.body, ChatBody):
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return call.answer("chat.completion", choices=[choice])
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return call.answer("text_completion", choices=[choice])


async def events(call: ModelCall[CompletionsBody] | ModelCall[ChatBody]) -> AsyncGenerator[bytes, None]:
    """Yield the server-sent events of an answer. Raises ApiError."""
    chat = isinstance(call.body, ChatBody)
    wants_usage = call.body.stream_options.include_usage
    head = {
        "id": call.terms.request_id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": call.created,
        "model": call.body.model,
    }

    def event(choices: Sequence[Mapping[str, Any]], usage: Any = None) -> bytes:
        return data({**head, "choices": choices, **({"usage": usage} if wants_usage else {})})

    def choice(reason: str | None, **content: Any) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    first = chat
    async with aclosing(pieces(call)) as parts:
        async for piece in parts:
            if first:
                yield event([choice(None, delta={"role": "assistant", "content": ""})])
                first = False
            if not chat:
                yield event([choice(piece.finish_reason, text=piece.text)])
                continue
            if piece.text:
                yield event([choice(None, delta={"content": piece.text})])
            if piece.finish_reason:
                yield event([choice(piece.finish_reason, delta={})])
    if wants_usage:
        yield event([], call.usage)
    yield b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


async def tokenize(call: ModelCall[TokenizeBody]) -> dict[str, Any]:
    """Answer /tokenize: the tokens of a prompt or a chat, as a generation reads them. Raises ApiError."""
    value, chat = await prompt_of(call)
    converted = json.loads(await _converted(call, value, {"tokenize": True, "chat": chat}))
    return {"count": len(converted["tokens"]), **converted, "token_strs": None}


async def detokenize(call: ModelCall[DetokenizeBody]) -> dict[str, Any]:
    """Answer /detokenize: the text of tokens. Raises ApiError."""
    value = to_json(call.body.tokens)
    return {"prompt": await _converted(call, value, {"detokenize": True})}


async def _converted(call: ModelCall[Any], value: Value, fields: Mapping[str, bool]) -> str:
    """Return the text that the model's tokenizer sends for `value` with these parameters. Raises ApiError."""
    if "text" not in call.model.inputs:
        raise invalid(f"{call.model.name} has no tokenizer", "model")
    async with aclosing(call.backend.stream(call.model, value, fields, call.terms)) as responses:
        outputs: dict[str, Any] = await anext(responses, {})
    (text,) = outputs.get(call.model.outputs["text"], [b""])
    return str(text, "utf-8")
