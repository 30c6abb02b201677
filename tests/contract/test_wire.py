"""What goes over the wire comes back as it was: one round trip a pair of to_wire and from_wire, through real bytes."""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kv.transfer import Accepted, Endpoint, Heartbeat, LeaseClosed, PrefillRequest, PromptFinished, ReadyBlocks
from weft.request import (
    DraftCounts,
    FinishReason,
    Grammar,
    ModelFingerprint,
    PositionLogprobs,
    PromptLogprobs,
    PromptUsage,
    RequestKey,
    Retention,
    SamplingParams,
    Speculation,
    TokenLogprob,
    WorkerAddress,
    WorkerRole,
)
from weft.rpc import wire
from weft_mesh.v1 import common_pb2, decode_service_pb2, prefill_service_pb2
from weft_services.decode.sequences import DecodeUpdate, SequenceFailure
from weft_services.decode.service import sequence_from_wire, update_to_wire

MessageT = TypeVar("MessageT", bound=Any)


def through_bytes(message: MessageT) -> MessageT:
    """As the other side parses it."""
    parsed: MessageT = type(message).FromString(message.SerializeToString())
    return parsed


u32 = st.integers(0, 2**32 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
u64 = st.integers(0, 2**64 - 1)
f32 = st.floats(width=32, allow_nan=False)
text = st.text(max_size=20)
keys = st.builds(RequestKey, text, u32)
tokens = st.lists(u32, max_size=20).map(tuple)
samplings = st.builds(
    SamplingParams,
    max_tokens=u32,
    temperature=f32,
    top_p=f32,
    top_k=u32,
    min_p=f32,
    seed=u64,
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | u32,
    frequency_penalty=f32,
    presence_penalty=f32,
    repetition_penalty=f32,
    logit_bias=st.lists(st.tuples(u32, f32), max_size=3).map(tuple),
    min_tokens=u32,
    grammar=st.none() | st.builds(Grammar, text, text),
)
entries = st.builds(TokenLogprob, u32, f32)
positions = st.builds(PositionLogprobs, entries, st.lists(entries, max_size=5).map(tuple))
chances = st.lists(f32, max_size=5).map(tuple)
prompt_logprobs = st.builds(PromptLogprobs, u32, chances, tokens, tokens, chances, u32)
fingerprints = st.builds(ModelFingerprint, text, text, u32, u64, text)
endpoints = st.builds(Endpoint, text, text, u64, text)
usages = st.builds(PromptUsage, u32, u32, u64, u32, u32, u32, text, text, u32, u32, u32, u32)
drafts = st.builds(DraftCounts, u32, u32, u32, u32)
retentions = st.builds(Retention, u32, st.booleans())
orders = st.builds(
    PrefillRequest, keys, text, fingerprints, tokens, samplings, st.binary(max_size=20), u32, u32, i32, retentions, u32
)
events = st.one_of(
    st.builds(Accepted, text, endpoints, u32),
    st.builds(ReadyBlocks, u32, tokens, st.lists(u64, max_size=5).map(tuple)),
    st.builds(PromptFinished, u32, st.none() | positions, u32, u32, u32, u32),
    st.builds(LeaseClosed, st.booleans()),
    st.builds(Heartbeat),
)


@given(keys)
def test_request_keys(key: RequestKey) -> None:
    assert wire.key_from_wire(through_bytes(wire.key_to_wire(key))) == key


@given(samplings)
def test_sampling(params: SamplingParams) -> None:
    assert wire.sampling_from_wire(through_bytes(wire.sampling_to_wire(params))) == params


def test_floats_come_back_as_float32_holds_them() -> None:
    sent = SamplingParams(max_tokens=1, temperature=0.7)
    assert wire.sampling_from_wire(through_bytes(wire.sampling_to_wire(sent))).temperature == _as_float32(0.7)


def _as_float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@given(positions)
def test_logprobs(position: PositionLogprobs) -> None:
    assert wire.logprobs_from_wire(through_bytes(wire.logprobs_to_wire(position))) == position


@given(prompt_logprobs)
def test_prompt_logprobs(piece: PromptLogprobs) -> None:
    assert wire.prompt_logprobs_from_wire(through_bytes(wire.prompt_logprobs_to_wire(piece))) == piece


@given(fingerprints)
def test_fingerprints(fingerprint: ModelFingerprint) -> None:
    assert wire.fingerprint_from_wire(through_bytes(wire.fingerprint_to_wire(fingerprint))) == fingerprint


@given(st.builds(WorkerAddress, text, text, text))
def test_worker_addresses(worker: WorkerAddress) -> None:
    assert wire.address_from_wire(through_bytes(wire.address_to_wire(worker))) == worker


@given(drafts)
def test_draft_counts(counts: DraftCounts) -> None:
    assert wire.drafts_from_wire(through_bytes(wire.drafts_to_wire(counts))) == counts


@given(st.builds(Speculation, st.booleans(), tokens))
def test_speculation_reaches_the_worker(speculation: Speculation) -> None:
    start = decode_service_pb2.StartSequence(speculation=wire.speculation_to_wire(speculation))
    assert sequence_from_wire(through_bytes(start)).speculation == speculation


@given(usages)
def test_prompt_usage(usage: PromptUsage) -> None:
    assert wire.usage_from_wire(through_bytes(wire.usage_to_wire(usage))) == usage


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons(reason: FinishReason | None) -> None:
    assert wire.finish_from_wire(wire.finish_to_wire(reason)) is reason


@pytest.mark.parametrize("role", list(WorkerRole))
def test_roles(role: WorkerRole) -> None:
    assert wire.role_from_wire(wire.role_to_wire(role)) is role


def test_a_role_that_is_not_told_is_an_error() -> None:
    with pytest.raises(KeyError):
        wire.role_from_wire(common_pb2.WORKER_ROLE_UNSPECIFIED)


@given(endpoints)
def test_transfer_endpoints(endpoint: Endpoint) -> None:
    assert wire.endpoint_from_wire(through_bytes(wire.endpoint_to_wire(endpoint))) == endpoint


@given(orders)
def test_prefill_orders(order: PrefillRequest) -> None:
    assert wire.prefill_request_from_wire(through_bytes(wire.prefill_request_to_wire(order))) == order


@given(events)
def test_prefill_events(event: Any) -> None:
    assert wire.event_from_wire(through_bytes(wire.event_to_wire(event))) == event


def test_an_event_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown"):
        wire.event_from_wire(prefill_service_pb2.PrefillResponse())


@given(keys, st.none() | st.builds(WorkerAddress, text, text, text), tokens, samplings, u32)
def test_a_start_becomes_an_order(
    key: RequestKey, prefill: WorkerAddress | None, token_ids: tuple[int, ...], sampling: SamplingParams, number: int
) -> None:
    start = decode_service_pb2.StartSequence(
        key=wire.key_to_wire(key),
        decode_boot_id="boot",
        prefill=wire.address_to_wire(prefill) if prefill else None,
        token_ids=token_ids,
        sampling=wire.sampling_to_wire(sampling),
        cache_salt=b"salt",
        remaining_ms=number,
        resumed_tokens=number,
        priority=-7,
        retention=wire.retention_to_wire(Retention(number, memory_only=True)),
        num_prompt_logprobs=None if prefill else number,
    )
    order = sequence_from_wire(through_bytes(start))
    assert (order.key, order.prefill, order.token_ids, order.sampling) == (key, prefill, token_ids, sampling)
    assert (order.decode_boot_id, order.cache_salt, order.resumed_tokens) == ("boot", b"salt", number)
    assert (order.remaining_seconds, order.priority) == (number / 1000, -7)
    assert order.retention == Retention(number, memory_only=True)
    assert order.num_prompt_logprobs == (None if prefill else number)


@given(keys, tokens, st.lists(positions, max_size=3).map(tuple), st.none() | usages)
def test_a_delta_reaches_the_gateway(
    key: RequestKey, token_ids: tuple[int, ...], logprobs: tuple[PositionLogprobs, ...], usage: PromptUsage | None
) -> None:
    delta = through_bytes(update_to_wire(DecodeUpdate(key, token_ids, logprobs, usage, FinishReason.STOP)))
    assert wire.key_from_wire(delta.key) == key
    assert tuple(delta.token_ids) == token_ids
    assert tuple(map(wire.logprobs_from_wire, delta.logprobs)) == logprobs
    assert (wire.usage_from_wire(delta.prompt) if delta.HasField("prompt") else None) == usage
    assert delta.finish_reason == common_pb2.FINISH_REASON_STOP
    assert not delta.HasField("failure")


def test_a_failure_reaches_the_gateway() -> None:
    delta = through_bytes(
        update_to_wire(DecodeUpdate(RequestKey("r"), failure=SequenceFailure(14, "gone", "decode-1")))
    )
    assert (delta.failure.code, delta.failure.message, delta.failure.worker_id) == (14, "gone", "decode-1")
    assert delta.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
