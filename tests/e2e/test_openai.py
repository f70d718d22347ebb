"""`rsrv openai` in front of a real server, with OpenAI's and Cohere's clients."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from rsrv.cli import main as cli
from rsrv.serve import demo
from tests.e2e import openais, stateful
from tests.e2e.gateways import running_gateway
from tests.e2e.harness import RunningTriton, make_repository, running_triton
from tests.e2e.openais import RunningOpenai, running_openai
from tests.status import read_status
from tests.waiting import wait_until

MODELS = ("busy", "classify", "embed", "embed_ids", "glossary_bytes", "rank", "talker", "teller", "tokens")
TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SETTINGS = "models: {busy: {start: lazy, max_queue_depth: 1, max_batch_size: 1}}"
TEXTS = ["", "two words", "snow: \N{SNOWMAN}", "line\nline"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    """A server with small models. All but one of them have tasks."""
    home = tmp_path_factory.mktemp("openai")
    openais.write_bundles(home / "bundles")
    shutil.copytree(home / "bundles" / "classify", home / "bundles" / "busy")
    paths = (stateful.ensure() / name for name in ("teller", "tokens", "sums"))
    stateful.with_chat(home / "bundles" / "talker", TEMPLATE, stateful.ensure() / "teller")
    sources = (home / "bundles", *paths, demo.DATA / demo.BUNDLES / "glossary_bytes")
    repository = make_repository(home, *sources, settings=SETTINGS)
    # For one text, the hooks of `embed` are slow, so other requests wait in Triton.
    expected = ["waits_in_triton", "queue_full"]
    with running_triton(repository, home / "server.log", expected=expected) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: RunningTriton) -> Iterator[RunningOpenai]:
    """A process of `rsrv openai` without keys."""
    with running_openai(server.grpc_port, models=MODELS) as running:
        yield running


def test_models_with_a_task_are_listed(api: RunningOpenai) -> None:
    """The list has the models with a task. Models without a task are not found."""
    client = api.openai()
    assert [model.id for model in client.models.list().data] == sorted(MODELS)
    assert client.models.retrieve("embed").model_extra["task"] == "feature-extraction"
    with pytest.raises(openai.NotFoundError, match="there is no model 'sums'"):
        client.models.retrieve("sums")


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_are_the_models_own(api: RunningOpenai, form: str) -> None:
    """Each text gets its own embedding at its own index, and the tokens are counted."""
    answer = api.openai().embeddings.create(model="embed", input=TEXTS, encoding_format=form)

    assert [entry.index for entry in answer.data] == [0, 1, 2, 3]
    for text, entry in zip(TEXTS, answer.data, strict=True):
        embedding = entry.embedding
        if isinstance(embedding, str):
            embedding = np.frombuffer(base64.b64decode(embedding), "<f4")
        np.testing.assert_allclose(embedding, openais.expected_embedding(text), atol=1e-5)
    assert (
        answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(text.encode()) for text in TEXTS)
    )


def test_embeddings_are_cut_where_the_model_allows_it(api: RunningOpenai) -> None:
    """An embedding that is cut to an allowed size has length 1. Other sizes are refused."""
    client = api.openai()
    (entry,) = client.embeddings.create(model="embed", input="snow", dimensions=4).data
    head = openais.expected_embedding("snow")[:4]
    np.testing.assert_allclose(entry.embedding, head / np.linalg.norm(head), atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="can be cut to 4, 8") as refused:
        client.embeddings.create(model="embed", input="snow", dimensions=5)
    assert refused.value.param == "dimensions"


def test_five_hundred_texts_share_executions(api: RunningOpenai, server: RunningTriton) -> None:
    """A list of 500 texts is answered completely. The waiting texts share executions."""

    def status() -> dict[str, Any]:
        record: dict[str, Any] = read_status(server.pid)["models"]["embed"]
        return record

    before = status()["dispatches"]
    texts = [f"text {number}" for number in range(500)]
    with ThreadPoolExecutor(1) as pool:
        server.operate("pause", "embed")
        try:
            asking = pool.submit(api.openai().embeddings.create, model="embed", input=texts)
            wait_until(lambda: status()["queued"] >= 32 or asking.done(), what="texts that wait")
        finally:
            server.operate("continue", "embed")
        answer = asking.result()

    embeddings = np.array([entry.embedding for entry in answer.data])
    np.testing.assert_allclose(embeddings, [openais.expected_embedding(text) for text in texts], atol=1e-5)
    assert status()["dispatches"] - before < 500


def test_one_bad_text_fails_the_call_with_its_index(api: RunningOpenai) -> None:
    """If one text of a call is bad, the call fails, and the error has the index of the text."""
    with pytest.raises(openai.BadRequestError) as refused:
        api.openai().embeddings.create(model="embed", input=["one", openais.BAD, "three"])
    assert "input[1]" in refused.value.message
    assert "this text is bad" in refused.value.message
    assert (refused.value.code, refused.value.param) == ("INVALID", "input[1]")


def test_token_ids_need_a_model_of_ids(api: RunningOpenai) -> None:
    """A model of texts refuses token ids."""
    with pytest.raises(openai.BadRequestError, match="embed takes texts, not token ids"):
        api.openai().embeddings.create(model="embed", input=[[1, 2]])


def test_a_model_of_ids_takes_token_ids(api: RunningOpenai) -> None:
    """A model of ids treats a list of ids as one text. It reports no tokens, so the answer has no usage."""
    create = api.openai().embeddings.create
    rows = [list(b"snow"), list(b"rain")]
    for ids, texts in ((rows[0], ["snow"]), (rows, ["snow", "rain"])):
        answer = create(model="embed_ids", input=ids)
        expected = [openais.expected_embedding(text) for text in texts]
        np.testing.assert_allclose([entry.embedding for entry in answer.data], expected, atol=1e-5)
        assert answer.usage is None
    with pytest.raises(openai.BadRequestError, match="embed_ids takes token ids, not texts"):
        create(model="embed_ids", input="snow")
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]"):
        create(model="embed_ids", input=[rows[0], [1, 2, 3]])


def test_tokens_of_a_prompt_and_their_text(api: RunningOpenai) -> None:
    """/tokenize returns the tokens that a generation reads from a prompt or a chat, even if the prompt is too long for an answer.

    /detokenize returns their text.
    """
    _, reply, _ = api.post("/tokenize", {"model": "teller", "prompt": "Once"})
    context = reply["max_model_len"]
    assert reply == {"count": 4, "tokens": reply["tokens"], "max_model_len": context, "token_strs": None}
    body = {"model": "teller", "tokens": reply["tokens"]}
    assert api.post("/detokenize", body)[1] == {"prompt": "Once"}
    long = {"model": "teller", "prompt": "x" * (context + 1)}
    assert api.post("/tokenize", long)[1]["count"] == context + 1

    messages = [{"role": "user", "content": "Once"}]
    _, chat, _ = api.post("/tokenize", {"model": "talker", "messages": messages})
    assert chat["count"] == len("user: Once\nassistant: ")
    body = {"model": "talker", "tokens": chat["tokens"]}
    assert api.post("/detokenize", body)[1]["prompt"] == "user: Once\nassistant: "
    for wrong, reason in (
        ({"model": "glossary_bytes", "prompt": "a"}, "glossary_bytes has no tokenizer"),
        ({"model": "embed", "prompt": "a"}, "this path needs text-generation"),
        ({"model": "teller"}, "send either `prompt` or `messages`"),
        ({"model": "teller", "prompt": "a", "return_token_strs": True}, "not supported"),
    ):
        status, answer, _ = api.post("/tokenize", wrong)
        assert status == 400
        assert reason in answer["error"]["message"]


def test_documents_are_ranked(api: RunningOpenai) -> None:
    """Cohere's client gets the indices of the documents, starting with the best one."""
    documents = ["b", "aaaa", "aa", "zz"]
    answer = api.cohere().rerank(model="rank", query="ab", documents=documents, top_n=3)

    scores = [openais.expected_score("ab", document) for document in documents]
    order = sorted(range(4), key=lambda index: (-scores[index], index))[:3]
    assert [result.index for result in answer.results] == order
    assert [result.relevance_score for result in answer.results] == [scores[index] for index in order]

    body = {"model": "rank", "query": "ab", "documents": [{"text": "b"}, "aa"], "return_documents": True}
    _, jina, _ = api.post("/v1/rerank", body)
    assert [result["document"]["text"] for result in jina["results"]] == ["aa", "b"]
    assert jina["usage"]["total_tokens"] == 3 + 4


def test_pairs_get_scores_and_texts_get_labels(api: RunningOpenai) -> None:
    """The answers for scores of pairs and for classes of texts have vLLM's form."""
    _, scored, _ = api.post("/v1/score", {"model": "rank", "text_1": "ab", "text_2": ["a", "bb"]})
    assert [entry["score"] for entry in scored["data"]] == [
        openais.expected_score("ab", text) for text in ("a", "bb")
    ]
    status, wrong, _ = api.post(
        "/v1/score", {"model": "rank", "text_1": ["a", "b"], "text_2": ["a", "b", "c"]}
    )
    assert (status, wrong["error"]["param"]) == (400, "text_1")

    _, classes, _ = api.post("/v1/classify", {"model": "classify", "input": ["abc", "a long text"]})
    assert [entry["label"] for entry in classes["data"]] == openais.LABELS
    assert classes["data"][0]["probs"] == [1.0, 0.0]


#: A model, a prompt and the model's answer. The demo's model has no tokenizer.
STORIES = [
    ("teller", "Once", stateful.told(b"Once", 40)),
    ("glossary_bytes", '"Licensor" ', "shall mean the copyright owner or entity"),
]


@pytest.mark.parametrize(("model", "prompt", "expected"), STORIES)
def test_a_completion_is_streamed(api: RunningOpenai, model: str, prompt: str, expected: str) -> None:
    """The pieces of a stream are the whole text. The usage comes at the end."""
    client = api.openai()
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 40)

    whole = client.completions.create(model=model, prompt=prompt, max_tokens=40)
    assert whole.choices[0].text == text
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.parametrize(("model", "prompt", "expected"), STORIES)
@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_text_ends_a_chat(
    api: RunningOpenai, model: str, prompt: str, expected: str, streams: bool
) -> None:
    """The answer of a chat ends before the stop text."""
    answer = api.openai().chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": [{"type": "text", "text": prompt}]}],
        max_completion_tokens=200,
        stop=[expected[10:14]],
        stream=streams,
    )
    expected = expected.partition(expected[10:14])[0]
    if not streams:
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"
        return
    chunks = list(answer)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_chat_has_the_models_own_template(api: RunningOpenai) -> None:
    """The model's template joins the messages of a chat, and decides which roles are allowed."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once"}]
    answer = api.openai().chat.completions.create(model="talker", messages=messages, max_tokens=40)
    prompt = b"system: Be brief.\nuser: Once\nassistant: "
    assert answer.choices[0].message.content == stateful.told(prompt, 40)
    assert answer.usage.prompt_tokens == len(prompt)
    with pytest.raises(openai.BadRequestError, match="unknown role tool"):
        api.openai().chat.completions.create(model="talker", messages=[{"role": "tool", "content": "x"}])


def test_a_client_that_leaves_ends_its_work(api: RunningOpenai, server: RunningTriton) -> None:
    """When the client of a stream disconnects, the runtime cancels the generation."""

    def active() -> int:
        return int(read_status(server.pid)["models"]["teller"]["generations"])

    with api.openai().completions.create(
        model="teller", prompt="Once", max_tokens=1_000_000, stream=True
    ) as stream:
        next(iter(stream))
        wait_until(lambda: active() == 1, what="the generation")
    wait_until(lambda: active() == 0, what="the end of the generation")


def test_errors_have_openais_form_and_the_tag_as_code(api: RunningOpenai) -> None:
    """Errors have OpenAI's form. Their code is rsrv's tag."""
    for path, body, status, code in (
        ("/v1/embeddings", {"model": "rank", "input": "a"}, 400, "INVALID"),
        ("/v1/embeddings", {"model": "none", "input": "a"}, 404, "NOT_FOUND"),
        ("/v1/chat/completions", {"model": "teller", "messages": [], "tools": [1]}, 400, "INVALID"),
        ("/v1/completions", {"model": "tokens", "prompt": "a"}, 400, "INVALID"),
        ("/v1/completions", {"model": "teller", "prompt": "", "stream": True}, 400, "INVALID"),
        ("/v1/nothing", {}, 404, "NOT_FOUND"),
        ("/v1/embeddings", b"x" * (17 << 20), 413, "INVALID"),
    ):
        answered, answer, headers = api.post(path, body)
        assert (answered, answer["error"]["code"]) == (status, code), (path, answer)
        assert headers["X-Request-Id"]
    assert (
        api.post("/v1/embeddings", {"model": "embed", "input": "a"}, **{"Content-Type": "text/plain"})[0]
        == 415
    )


def test_a_deadline_ends_a_call(api: RunningOpenai) -> None:
    """The header X-Timeout-S limits the whole call. The answer has the client's own request id."""
    body = {"model": "embed", "input": openais.SLOW}
    status, answer, headers = api.post(
        "/v1/embeddings", body, **{"X-Timeout-S": "0.1", "X-Request-Id": "mine"}
    )
    assert (status, answer["error"]["code"], headers["X-Request-Id"]) == (504, "DEADLINE", "mine")
    assert api.post("/v1/embeddings", body, **{"X-Timeout-S": "no"})[0] == 400


def test_two_keys_call_their_own_models(server: RunningTriton, tmp_path: Path) -> None:
    """A caller sees and can call only the models of its key, and usage is counted by key.

    When the file of keys changes, the process reads it again.
    """
    keys = tmp_path / "keys.yaml"
    hashes = {name: sha256(name.encode()).hexdigest() for name in ("first", "second", "third")}
    keys.write_text(
        f"a: {{sha256: {hashes['first']}, models: [emb*]}}\nb: {{sha256: {hashes['second']}, priority: 1}}\n"
    )
    with running_openai(server.grpc_port, f"--keys={keys}") as running:
        first, second = running.openai("first"), running.openai("second")
        wait_until(lambda: len(second.models.list().data) == len(MODELS))
        assert [model.id for model in first.models.list().data] == ["embed", "embed_ids"]
        first.embeddings.create(model="embed", input="abc")
        second.embeddings.create(model="embed", input="abcd")
        with pytest.raises(openai.NotFoundError):
            first.completions.create(model="teller", prompt="Once")
        for key in ("third", "none"):
            with pytest.raises(openai.AuthenticationError):
                running.openai(key).models.list()

        for text in (
            'rsrv_openai_requests_total{key="a",model="embed",status="200"} 1.0',
            'rsrv_openai_tokens_total{key="b",kind="prompt",model="embed"} 4.0',
            'rsrv_openai_requests_total{key="",model="",status="401"}',
        ):
            wait_until(lambda text=text: text in running.metrics(), what=text)  # type: ignore[misc]

        keys.write_text(f"c: {{sha256: {hashes['third']}}}\n")
        wait_until(lambda: running.get("/v1/models", Authorization="Bearer third")[0] == 200)
        assert running.get("/v1/models", Authorization="Bearer first")[0] == 401


def test_other_machines_need_keys(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a file of keys, `rsrv openai` refuses to listen on addresses that other machines reach."""
    assert cli.main(["openai", "--listen=0.0.0.0:0"]) == 1
    assert "callers need keys" in capfd.readouterr().err


def test_a_gateway_may_be_behind_it(server: RunningTriton, tmp_path: Path) -> None:
    """The server of `rsrv openai` may be a gateway. Embeddings, streams and errors are then the same as with a server."""
    with (
        running_gateway(tmp_path, [server]) as gateway,
        running_openai(gateway.grpc_port, models=MODELS) as running,
    ):
        client = running.openai()
        (entry,) = client.embeddings.create(model="embed", input="snow").data
        np.testing.assert_allclose(entry.embedding, openais.expected_embedding("snow"), atol=1e-5)
        stream = client.completions.create(model="teller", prompt="Once", max_tokens=40, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == stateful.told(b"Once", 40)
        with pytest.raises(openai.BadRequestError, match=r"input\[1\]"):
            client.embeddings.create(model="embed", input=["a", openais.BAD])


def test_cold_models_start_and_full_queues_are_429(api: RunningOpenai, server: RunningTriton) -> None:
    """The first call of a cold model waits for the start. When the queue is full, calls get 429 with Retry-After."""
    assert "busy" not in read_status(server.pid)["models"]
    call = {"model": "busy", "input": ["abc"]}
    _, answer, _ = api.post("/v1/classify", call)
    assert answer["data"][0]["label"] == openais.LABELS[0]

    server.operate("pause", "busy")
    status, refused, headers = api.post("/v1/classify", {"model": "busy", "input": ["abc"] * 500})
    server.operate("continue", "busy")
    assert (status, refused["error"]["code"]) == (429, "QUEUE_FULL")
    assert int(headers["Retry-After"]) >= 1
    # A client that sends the request again gets an answer.
    wait_until(lambda: api.post("/v1/classify", call)[0] == 200, what="an answer of the busy model")
