"""/tokenize and /detokenize through vLLM-style clients and gRPC, compared with what a request sends."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import orjson
import pytest
from tokenizers import Tokenizer, processors

from tests.services.gateway.conftest import CONTEXT, END, MODEL_NAME, TEMPLATE, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_grpc import stub_of
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_services.gateway.front import grpc_service, local_endpoints
from weft_services.gateway.mesh.prepare import MAX_COUNTED_CHARS

USER: Any = {"role": "user", "content": "hello ü"}
TOOL: Any = {"type": "function", "function": {"name": "now"}}

WRONG: list[tuple[str, dict[str, Any], str, int]] = [
    ("/tokenize", {}, "prompt", 400),
    ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt", 400),
    ("/tokenize", {"prompt": 5}, "prompt", 400),
    ("/tokenize", {"messages": [{"role": "robot"}]}, "messages.0.role", 400),
    ("/tokenize", {"prompt": "a" * (MAX_COUNTED_CHARS + 1)}, "prompt", 400),
    ("/tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template", 400),
    ("/tokenize", {"prompt": "x", "model": "other"}, "model", 404),
    ("/detokenize", {}, "tokens", 400),
    ("/detokenize", {"tokens": [999]}, "tokens", 400),
    ("/detokenize", {"tokens": [-1]}, "tokens.0", 400),
    ("/detokenize", {"tokens": ["a"]}, "tokens.0", 400),
    ("/detokenize", {"tokens": [1] * 65_537}, "tokens", 400),
    ("/detokenize", {"tokens": [1], "model": "other"}, "model", 404),
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """One that begins every text with BOS."""
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $0", special_tokens=[("<|bos|>", 1)])
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """With that tokenizer."""
    return write_model(tmp_path_factory.mktemp("bos"), tokenizer, TEMPLATE)


async def test_a_prompt_has_the_tokens_that_a_completion_has(bench: MakeBench) -> None:
    async with bench() as b:
        await b.client.completions.create(model=MODEL_NAME, prompt="hello ü")
        ids = list(b.decode.started[0].token_ids)
        found = (await b.http.post("/tokenize", json={"model": MODEL_NAME, "prompt": "hello ü"})).json()
        assert found == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
        bare = {"prompt": "hello ü", "add_special_tokens": False, "return_token_strs": True}
        found = (await b.http.post("/tokenize", json=bare)).json()
        assert found["tokens"] == ids[1:]
        assert found["token_strs"] == [b.tokenizer.id_to_token(token) for token in ids[1:]]
        assert len(b.decode.started) == 1


async def test_messages_have_the_tokens_that_a_chat_has(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        b.decode.script = speaking([END])
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], tools=[TOOL])
        ids = list(b.decode.started[0].token_ids)
        body = {"model": MODEL_NAME, "messages": [USER], "tools": [TOOL]}
        assert (await b.http.post("/tokenize", json=body)).json()["tokens"] == ids
        closed = (await b.http.post("/tokenize", json={**body, "add_generation_prompt": False})).json()["tokens"]
        assert closed == ids[: len(closed)]
        assert b.tokenizer.decode(ids[len(closed) :], skip_special_tokens=False) == "<|im_start|>assistant\n"
        chat = pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="hello ü")],
            tools_json=['{"type": "function", "function": {"name": "now"}}'],
        )
        answer = await stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=10)
        assert (list(answer.token_ids), answer.max_context_tokens) == (ids, CONTEXT)
        request = pb.TokenizeRequest(chat=chat, no_generation_prompt=True, return_token_strings=True)
        answer = await stub.Tokenize(request, timeout=10)
        assert (list(answer.token_ids), len(answer.token_strings)) == (closed, len(closed))


async def test_there_and_back_is_the_same_text(bench: MakeBench) -> None:
    text = "naïve <tag> 🙂\n\n the answer<|im_end|>"
    async with bench() as b, stub_of(b) as stub:
        tokens = (await b.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert (await b.http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": f"<|bos|>{text}"}
        assert list((await stub.Tokenize(pb.TokenizeRequest(text=text), timeout=10)).token_ids) == tokens
        answer = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens), timeout=10)
        assert answer.text == f"<|bos|>{text}"
        assert (await b.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_what_is_wrong_is_named(bench: MakeBench) -> None:
    async with bench() as b:
        for path, fields, param, status in WRONG:
            code, error = await b.refused(path, **fields)
            assert (code, error["param"]) == (status, param), fields
            assert param in error["message"]


async def test_a_conversation_names_its_model_over_grpc(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        chat = pb.ChatRequest(model="other", messages=[pb.ChatMessage(role="user", content="hi")])
        with pytest.raises(grpc.aio.AioRpcError, match="other") as refusal:
            await stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=10)
        assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await stub.Tokenize(pb.TokenizeRequest(model=MODEL_NAME, chat=chat), timeout=10)).token_ids


async def test_what_is_longer_than_the_context_is_counted_all_the_same(bench: MakeBench) -> None:
    text = "a b " * 500
    async with bench() as b, stub_of(b) as stub:
        found = (await b.http.post("/tokenize", json={"prompt": text})).json()
        assert found["count"] == len(b.ids(text)) > found["max_model_len"] == CONTEXT
        assert len((await stub.Tokenize(pb.TokenizeRequest(text=text), timeout=10)).token_ids) == found["count"]
        messages = [{"role": "user", "content": text}]
        rendered = (await b.http.post("/tokenize", json={"messages": messages})).json()["count"]
        for path, fields in (
            ("/v1/messages/count_tokens", {"messages": messages}),
            ("/v1/responses/input_tokens", {"input": text, "max_output_tokens": 9000}),
        ):
            answer = await b.http.post(path, json={"model": MODEL_NAME, **fields})
            assert (answer.status_code, answer.json()["input_tokens"]) == (200, rendered)


async def test_a_bug_is_a_500_whose_traceback_is_in_the_log(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: Any) -> Any:
        raise KeyError("internals")

    monkeypatch.setattr(local_endpoints, "tokenize", broken)
    async with bench() as b:
        status, error = await b.refused("/tokenize", prompt="x")
        assert (status, error["message"]) == (500, "internal error")
    assert any(record.exc_info and isinstance(record.exc_info[1], KeyError) for record in caplog.records)


async def test_a_text_that_is_long_for_its_tokens_is_refused(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_endpoints, "MAX_TOKENS", 8)
    async with bench() as b:
        assert (await b.http.post("/detokenize", json={"tokens": [1] * CONTEXT})).status_code == 200
        monkeypatch.setattr(local_endpoints, "CHARS_PER_TOKEN", 4)
        status, error = await b.refused("/detokenize", tokens=[1] * CONTEXT)
        assert (status, error["param"]) == (400, "tokens")
        assert f"{CONTEXT * len('<|bos|>')} characters" in error["message"]


async def test_what_may_be_long_is_not_written_on_the_loop(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[threading.Thread] = []

    def watched(write: Any) -> Any:
        def writing(found: Any) -> Any:
            writers.append(threading.current_thread())
            return write(found)

        return writing

    monkeypatch.setattr(local_endpoints, "orjson", SimpleNamespace(dumps=watched(orjson.dumps)))
    monkeypatch.setattr(grpc_service, "_tokenized", watched(grpc_service._tokenized))
    async with bench() as b, stub_of(b) as stub:
        for path, fields in (("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [1]})):
            assert (await b.http.post(path, json=fields)).status_code == 200
        await stub.Tokenize(pb.TokenizeRequest(text="hello"), timeout=10)
    assert len(writers) == 3
    assert threading.main_thread() not in writers
