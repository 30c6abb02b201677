"""Several models behind one gateway: names, tokenizers, templates and readiness of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from tests.services.gateway.conftest import CONTEXT, END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft.errors import ConfigError
from weft_mesh.v1 import common_pb2, scheduler_service_pb2
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.config import GatewayConfig

OTHER = "other"


@pytest.fixture
def both(model_dir: Path, tmp_path: Path) -> str:
    """WEFT_MODEL of the tiny model and one with another template and a shorter context."""
    other = tmp_path / OTHER
    shutil.copytree(model_dir, other)
    (other / "chat_template.jinja").write_text("{{ messages[0].content }} user:")
    config = json.loads((other / "config.json").read_text()) | {"max_position_embeddings": CONTEXT // 2}
    (other / "config.json").write_text(json.dumps(config))
    return f"{MODEL_NAME}={model_dir},{OTHER}={other}"


async def test_models_are_listed_in_their_order_and_an_unknown_one_is_a_404_with_all_names(
    bench: MakeBench, both: str
) -> None:
    async with bench(model=both) as b:
        listed = await b.client.models.list()
        cards = [(model.id, model.to_dict()["max_model_len"]) for model in listed.data]
        assert cards == [(MODEL_NAME, CONTEXT), (OTHER, CONTEXT // 2)]
        for wrong in (b.client.models.retrieve("third"), b.client.completions.create(model="third", prompt="x")):
            with pytest.raises(openai.NotFoundError, match=f"'third'.*'{MODEL_NAME}', '{OTHER}'"):
                await wrong


async def test_each_model_has_its_own_template_and_is_routed_by_its_name(bench: MakeBench, both: str) -> None:
    async with bench(model=both) as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        messages: Any = [{"role": "user", "content": "hi"}]
        for name, text in ((MODEL_NAME, None), (OTHER, "hi user:")):
            answer = await b.client.chat.completions.create(model=name, messages=messages)
            assert (answer.model, answer.choices[0].message.content) == (name, "hello")
            prompt = b.tokenizer.decode(list(b.decode.started[-1].token_ids))
            assert (prompt == text) == (name == OTHER)
        assert [request.model for request in b.scheduler.routed] == [MODEL_NAME, OTHER]


async def test_the_gateway_is_ready_while_one_model_can_be_served_and_says_which_cannot(
    bench: MakeBench, both: str
) -> None:
    async with bench(model=both) as b:  # the fake's workers serve the first alone
        answer = (await b.http.get("/ready")).json()
        missing = [f"{OTHER}: no decode worker has joined", f"{OTHER}: no prefill worker has joined"]
        assert answer == {"ready": True, "reasons": missing}
        b.scheduler.is_prefill_ready = False
        await b.gateway.watch.poll()
        response = await b.http.get("/ready")
        assert response.status_code == 503
        assert response.json()["reasons"] == [f"{MODEL_NAME}: no prefill worker is ready", *missing]
        for number in range(2):
            b.scheduler.arrivals.append(
                scheduler_service_pb2.WorkerArrival(
                    worker_id=f"other-{number}", role=common_pb2.WORKER_ROLE_DECODE, model=OTHER
                )
            )
        await b.gateway.watch.poll()
        reasons = (await b.http.get("/ready")).json()["reasons"]
        assert reasons[1:] == [f"{OTHER}: no decode worker has joined, 2 loading the model", missing[1]]


async def test_texts_are_tokenized_by_the_model_that_is_named(bench: MakeBench, both: str) -> None:
    async with bench(model=both) as b:
        found = (await b.http.post("/tokenize", json={"model": OTHER, "prompt": "hello"})).json()
        assert (found["tokens"], found["max_model_len"]) == (b.ids("hello"), CONTEXT // 2)
        response = await b.http.post("/detokenize", json={"tokens": found["tokens"]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")


async def test_a_key_for_one_model_is_told_of_that_one_alone(bench: MakeBench, both: str, tmp_path: Path) -> None:
    secret = make_secret()
    (tmp_path / "keys.json").write_text(dump_keys([ApiKey("alice", digest_of(secret), models=(OTHER,))]))
    async with bench(model=both, keys=str(tmp_path / "keys.json")) as b:
        theirs = b.client.with_options(api_key=secret)
        assert [model.id for model in (await theirs.models.list()).data] == [OTHER]
        with pytest.raises(openai.NotFoundError, match=f"use '{OTHER}'$"):
            await theirs.completions.create(model=MODEL_NAME, prompt="x")
        tokens = await b.http.post("/tokenize", json={"prompt": "x"}, headers={"authorization": f"Bearer {secret}"})
        assert tokens.json()["max_model_len"] == CONTEXT // 2


async def test_a_grpc_request_must_name_its_model_where_there_is_a_choice(bench: MakeBench, both: str) -> None:
    async with bench(model=both) as b, grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        stub: Any = InferenceServiceStub(channel)
        models = await stub.ListModels(pb.ListModelsRequest(), timeout=10)
        assert [card.id for card in models.models] == [MODEL_NAME, OTHER]
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Generate(pb.GenerateRequest(text="x"), timeout=10).read()
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"'{MODEL_NAME}', '{OTHER}'" in str(refusal.value.details())


def test_tool_formats_are_set_for_all_models_or_by_name(both: str) -> None:
    def formats(setting: str) -> dict[str, str]:
        return GatewayConfig(model=both, scheduler_addr="127.0.0.1:1", tool_format=setting).tool_formats

    assert formats("hermes") == {MODEL_NAME: "hermes", OTHER: "hermes"}
    assert formats(f"{OTHER}=none") == {MODEL_NAME: "auto", OTHER: "none"}
    with pytest.raises(ConfigError, match="no model is called 'third'"):
        formats("third=none")
