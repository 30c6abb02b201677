"""Chat completions as the official client sees them."""

from __future__ import annotations

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import LENGTH, speaking
from weft.kv.prefix import block_keys

USER = {"role": "user", "content": "tell me the answer"}


async def test_an_unstreamed_answer_has_text_reason_and_usage(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids("hello world")
        b.decode.script = speaking([*ids, END], cached=16)
        answer = await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER])
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            "hello world",
            "stop",
        )
        assert answer.id.startswith("chatcmpl-")
        assert answer.system_fingerprint == "fp_abcdef012345"
        prompt = b.ids("<|im_start|>user\ntell me the answer<|im_end|>\n<|im_start|>assistant\n")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(ids) + 1
        assert answer.usage.total_tokens == len(prompt) + len(ids) + 1
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 16
        start = b.decode.started[0]
        assert list(start.token_ids) == prompt
        assert start.prefill.worker_id == "prefill-0"
        assert start.decode_boot_id == "boot-0"
        assert list(b.scheduler.routed[0].block_keys) == block_keys(prompt, 16)


async def test_a_stream_opens_with_the_role_and_closes_with_usage(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids("hello world")
        b.decode.script = speaking(ids, LENGTH, cached=3)
        stream = await b.client.chat.completions.create(
            model=MODEL_NAME, messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        first, last = chunks[0], chunks[-1]
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "hello world"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == len(ids)
        assert last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == 3
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1
