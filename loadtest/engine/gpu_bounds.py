"""What the H200 bars of the engine ask for, derived without a GPU, and what is left to be seen on one.

    python -m loadtest.engine.gpu_bounds --out docs/results/gpu-bounds.md

Bounds are the planner's arithmetic on rates that were measured on an H200; the host's part of a step is timed here.
What neither tells is said in words.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import triton

from loadtest.engine.gpu_parts import SHAPE, attention_loop, host_seconds, least_ms, parts_of, peer_seconds, plan_of
from loadtest.kernels.packed_bounds import COPIED, ISSUED, MULTIPLIED
from loadtest.provenance import made_at
from weft.capacity.plan import TERA
from weft_kernels.paged_attention import decode

CONTEXT = 1024
DECODE_BARS = {1: 230, 32: 5500, 64: 9000, 128: 13_000, 256: 15_000}
PREFILL_BAR, PROMPTS = 25_000, (2048, 8192)
ATTENTION_BAR, IDLE_BAR_MS, PEER_BAR = 0.85, 0.1, 3
NUM_SMS = 132
# of the layer's launches on a GPU: two norms with their additions, four products, rotation with the write of KV,
# attention and the joining of its parts, the gate
LAYER_KERNELS = 10


def decode_table() -> Iterator[str]:
    """Steps in which every sequence generates."""
    yield "| batch | weights GB | KV GB | TFLOP | products ms | attention ms | bound tok/s | bar | of it | left |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    plan = plan_of(CONTEXT)
    for batch, bar in DECODE_BARS.items():
        products, attention = parts_of(plan, plan.roofline.decode_step(plan.stages[0], batch))
        least, asked = products.ms + attention.ms, batch / bar * 1e3
        total = (products.operations + attention.operations) / TERA
        yield (
            f"| {batch} | {products.read / 1e9:.2f} | {attention.read / 1e9:.2f} | {total:.2f} | {products.ms:.2f} "
            f"| {attention.ms:.2f} | {batch / least * 1e3:,.0f} | {bar:,} | {least / asked:.0%} "
            f"| {asked - least:.2f} ms |"
        )


def prefill_table() -> Iterator[str]:
    """Prompts in one chunk."""
    yield "| prompt | TFLOP, products | TFLOP, attention | bound ms | bound tok/s | bar tok/s | of it | left |"
    yield "|---|---|---|---|---|---|---|---|"
    for prompt in PROMPTS:
        plan = plan_of(prompt)
        products, attention = parts_of(plan, plan.roofline.prefill_step(plan.stages[0]))
        least, asked = products.ms + attention.ms, prompt / PREFILL_BAR * 1e3
        yield (
            f"| {prompt:,} | {products.operations / TERA:.1f} | {attention.operations / TERA:.2f} | {least:.1f} | "
            f"{prompt / least * 1e3:,.0f} | {PREFILL_BAR:,} | {least / asked:.0%} | {asked - least:.1f} ms |"
        )


def attention_table() -> Iterator[str]:
    """What a launch moves beside keys and values, and how its programs fill the GPU."""
    config = SHAPE.config()
    yield "| batch x context | KV MB | parts MB | programs | splits | of bandwidth at best |"
    yield "|---|---|---|---|---|---|"
    for batch, context in ((1, 1024), (32, 1024), (256, 1024), (1, 32_768), (32, 32_768)):
        programs = batch * config.num_kv_heads
        splits = min(decode.MAX_SPLITS, triton.next_power_of_2(triton.cdiv(2 * NUM_SMS, programs)))
        kv = 2 * batch * context * config.num_kv_heads * config.head_dim * 2
        # parts and their logarithms in fp32, written once and read once
        parts = 2 * 4 * batch * config.num_heads * splits * (config.head_dim + 1) if splits > 1 else 0
        yield (
            f"| {batch} x {context:,} | {kv / 1e6:.1f} | {parts / 1e6:.2f} | {programs * splits} | {splits} | "
            f"{kv / (kv + parts):.0%} |"
        )


def host_table(seconds: Mapping[int, float]) -> Iterator[str]:
    """Beside the step that runs meanwhile."""
    yield "| batch | plan, pack, settle: ms on the host | the GPU's step at least, ms |"
    yield "|---|---|---|"
    plan = plan_of(CONTEXT)
    for batch, took in seconds.items():
        yield f"| {batch} | {took * 1e3:.2f} | {least_ms(plan, batch):.2f} |"


PAGE = """# The engine's H200 bars: derived bounds

{made_at}.

Nothing on this page was measured on a GPU; [what was](engine-gpu.md) came later. It is derived by
`python -m loadtest.engine.gpu_bounds`, for {shape} shapes in bfloat16, from {copied:g} TB/s of a copy and
{multiplied:g} TFLOP/s of a product, as both were
measured on an H200. A step is no faster than its weights, keys and values are read and its products are multiplied;
attention and the products with weights run one after the other. *Of it*: the share of the bar's time that this takes.
*Left*: what remains for all the rest, of which nothing is known before a GPU runs it: how near cuBLAS and the kernels
come to both rates, gaps between kernels, sampling. `python -m loadtest.engine.gpu` measures that.

## Decode at a context of {context:,}

{decode}

Every bar lies within its bound, and leaves a sixth of its time or more.

## Prefill

{prefill}

## Decode attention at {attention_bar:.0%} of the bandwidth

{attention}

Parts, and the logarithms of their sums, are written once and read once. The main loop, as Triton {triton} compiles
it for Hopper, issues {slots:,} lanes of instructions for {kib} KiB of keys and values: {issuing:.0%} of the time that
reading them takes, at {issued:.1f} T lanes a second. So neither issuing nor joining keeps a batch from the bar. A
single short sequence cannot meet it: its parts alone take a fifth. How well loads and products overlap is not bounded.

## GPU idle at {idle_bar:g} ms a step

{host}

The loop is one step ahead: the host's part, timed on the CPU of the machine that made this page, costs the GPU nothing
while it is shorter than the step that runs meanwhile, as it is by {slack:.0f} times or more. Not in the table: the
launch of one graph and of some twenty copies and sampling kernels. Not bounded: the gaps inside a graph. There are
{kernels} kernels in the {shape}'s, so the bar holds only if they follow each other within {gap:.2f} microseconds.

## {peer_bar} times transformers' best mode at batch 32

Both read the same bytes. Our bar of {tokens:,} tok/s is a step of {bar_ms:.2f} ms, the bound {bound_ms:.2f} ms, so
{peer_bar} times our bar holds only while transformers takes {least_ms:.1f} ms or more. Its `generate` reads as much,
and copies its cache whole at every step: {cached_ms:.1f} ms at least. It launches kernel by kernel, and is no faster
than its host: {peer_ms:.1f} ms a step with {layers} layers of width 32 on this machine's CPU. Neither reaches
{least_ms:.1f} ms, and nothing bounds its kernels from below. Its continuous batching may replay graphs as well: for
that mode nothing beyond {bound_ms:.2f} ms is bounded. This bar is open until a GPU has run both.
"""


def page() -> str:
    """All of it."""
    loop, plan = attention_loop(), plan_of(CONTEXT)
    seconds = {batch: host_seconds(batch) for batch in DECODE_BARS}
    bar_ms, bound_ms = 32 / DECODE_BARS[32] * 1e3, least_ms(plan, 32)
    _, cached = parts_of(plan, plan.roofline.decode_step(plan.stages[0], 32))
    num_kernels = LAYER_KERNELS * SHAPE.layers + 3  # embedding, last norm, head
    return PAGE.format(
        made_at=made_at(),
        shape=SHAPE.name,
        layers=SHAPE.layers,
        context=CONTEXT,
        copied=COPIED / TERA,
        multiplied=MULTIPLIED / TERA,
        issued=ISSUED / TERA,
        triton=triton.__version__,
        decode="\n".join(decode_table()),
        prefill="\n".join(prefill_table()),
        attention="\n".join(attention_table()),
        attention_bar=ATTENTION_BAR,
        slots=loop.slots,
        kib=loop.key_bytes // 1024,
        issuing=loop.issue_share,
        host="\n".join(host_table(seconds)),
        slack=min(least_ms(plan, batch) / 1e3 / took for batch, took in seconds.items()),
        idle_bar=IDLE_BAR_MS,
        kernels=num_kernels,
        gap=IDLE_BAR_MS * 1e3 / num_kernels,
        tokens=DECODE_BARS[32],
        bar_ms=bar_ms,
        bound_ms=bound_ms,
        least_ms=PEER_BAR * bar_ms,
        peer_bar=PEER_BAR,
        peer_ms=peer_seconds() * 1e3,
        cached_ms=bound_ms + 2 * cached.read / COPIED * 1e3,
    )


def main() -> None:
    """Print the page, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    text = page()
    print(text, end="")
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    main()
