"""Bodies of requests: the fields that rsrv takes. docs/openai.md lists them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rsrv.openai.errors import from_validation

#: Maximum number of texts, pairs or documents in one call.
MAX_ITEMS: Final = 2048
#: Maximum number of token ids in one call.
MAX_TOKENS: Final = 1 << 20
#: Maximum numbers of messages of a chat, of stop texts, and of characters of a stop text.
MAX_MESSAGES, MAX_STOPS, MAX_STOP = 1024, 16, 256
#: Maximum number of characters of a model's name.
MAX_NAME: Final = 256

B = TypeVar("B", bound="ApiBody")


class ApiObject(BaseModel):
    """Base of all objects in bodies. A field that is null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    #: Fields of OpenAI's, Cohere's and vLLM's APIs that rsrv does not support. A field is accepted only with the value
    #: given here, which has no effect.
    UNSUPPORTED: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        used = {
            name: value
            for name, value in body.items()
            if value is not None and (name not in cls.UNSUPPORTED or value != cls.UNSUPPORTED[name])
        }
        # Keep only the first unknown field. A client may send a million such fields, and each would become an error.
        first = next((name for name in used if name not in cls.model_fields), None)
        return {name: value for name, value in used.items() if name in cls.model_fields or name == first}


class ApiBody(ApiObject):
    """Base of all bodies."""

    model: Annotated[str, Field(max_length=MAX_NAME)]
    #: The client's name for its user. It has no effect.
    user: str | None = None

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Return the body in a JSON text. Raises ApiError."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error, cls.UNSUPPORTED) from None


def _listed(value: Any) -> Any:
    """Return a list of texts, or of lists of ids. A single text or list of ids becomes a list with one element.

    Raises ValueError if there are too many texts or ids.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return value
    if max(len(value), sum(len(entry) for entry in value if isinstance(entry, list))) > MAX_TOKENS:
        raise ValueError(f"has more than {MAX_TOKENS:,} texts or token ids")
    return [value] if value and all(type(entry) is int for entry in value) else value


# Each list fails at its first wrong element, because millions of errors would take gigabytes.
Items = Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
Texts = Annotated[list[str], Items, BeforeValidator(_listed)]
Ids = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]],
    Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True),
]


class EmbeddingsBody(ApiBody):
    """POST /v1/embeddings."""

    input: Annotated[list[str | Ids], Items, BeforeValidator(_listed)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None


class _RankedDocument(ApiObject):
    text: str


class RerankBody(ApiBody):
    """POST /v1/rerank, in the form of Cohere and Jina."""

    UNSUPPORTED = {
        "max_tokens_per_doc": None,
        "max_chunks_per_doc": None,
        "rank_fields": ["text"],
        "truncation": None,
    }

    query: str
    documents: Annotated[list[str | _RankedDocument], Items]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreBody(ApiBody):
    """POST /v1/score, in the form of vLLM. `text_1` is one text for all of `text_2`, or one for each."""

    text_1: Texts
    text_2: Texts


class ClassifyBody(ApiBody):
    """POST /v1/classify, in the form of vLLM."""

    input: Texts


class StreamOptions(ApiObject):
    """Options of a stream."""

    include_usage: bool = False


#: A number of tokens.
Limit = Annotated[int, Field(ge=1, lt=2**31)]


class GenerationBody(ApiBody):
    """Fields that the bodies of completions and chats have in common."""

    max_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**24)] | None = None
    seed: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP)]],
        Field(max_length=MAX_STOPS, fail_fast=True),
        BeforeValidator(_listed),
    ] = []
    n: Literal[1] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


Prompt = Annotated[
    list[str | Ids], Field(min_length=1, max_length=1, fail_fast=True), BeforeValidator(_listed)
]


class CompletionsBody(GenerationBody):
    """POST /v1/completions."""

    UNSUPPORTED = {
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": None,
        "presence_penalty": 0,
        "suffix": None,
    }

    prompt: Prompt


class _ContentPart(ApiObject):
    type: Literal["text"]
    text: str


def _as_parts(content: Any) -> Any:
    """Return a text as a list of one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


#: A role or a name. Chat templates put it into the prompt as it is, so this pattern excludes special tokens.
Word = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]


class ChatMessage(ApiObject):
    """A message of a chat."""

    role: Word
    content: Annotated[list[_ContentPart], Field(fail_fast=True), BeforeValidator(_as_parts)]
    name: Word | None = None

    @property
    def text(self) -> str:
        """The texts of all parts of the content, joined without a separator."""
        return "".join(part.text for part in self.content)


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    UNSUPPORTED = {
        "audio": None,
        "frequency_penalty": 0,
        "function_call": None,
        "functions": [],
        "logit_bias": {},
        "logprobs": False,
        "metadata": None,
        "modalities": ["text"],
        "parallel_tool_calls": None,
        "prediction": None,
        "presence_penalty": 0,
        "reasoning_effort": None,
        "response_format": {"type": "text"},
        "service_tier": None,
        "store": False,
        "tool_choice": "none",
        "tools": [],
        "top_logprobs": None,
        "verbosity": None,
        "web_search_options": None,
    }

    messages: Messages
    max_completion_tokens: Limit | None = None


class TokenizeBody(ApiBody):
    """POST /tokenize, in the form of vLLM."""

    UNSUPPORTED = {"add_generation_prompt": True, "add_special_tokens": True, "return_token_strs": False}

    prompt: Prompt | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("send either `prompt` or `messages`")
        return self


class DetokenizeBody(ApiBody):
    """POST /detokenize, in the form of vLLM."""

    tokens: Ids
