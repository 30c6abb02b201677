"""`weft plan`: memory and throughput limits of a model on GPUs, with the arithmetic shown. Starts nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.capacity.draft import draft_size, feature_rows, step_rows
from weft.capacity.footprint import ITEM_BYTES, TensorKind
from weft.capacity.layout import GIB, GPUS, UNBOUNDED, Demand, PipelineStage, check_layout, layouts, on_stage, share
from weft.capacity.plan import COMMUNICATION_BYTES, RUNTIME_BYTES, TERA, CapacityPlan, StepShape, make_plan
from weft.cli.hub_models import fetch_with_display
from weft.errors import BadCheckpoint, StorageUnavailable
from weft.file_io import foreign_path
from weft.hub import fetch_config, hub_name
from weft.model.config import read_config
from weft.model.draft_config import DraftConfig
from weft.model.draft_layers import with_draft
from weft.model.kv_layout import token_numbers
from weft.model.mtp_config import MtpConfig, planned_mtp
from weft.model.sharding import BadPlan, Layout
from weft.model.spec import ModelConfig
from weft.options import DraftChoice, names_draft_head
from weft.weights.draft_checkpoint import read_draft_checkpoint
from weft.weights.object_store import fetched

DEFAULT_CONTEXT = 8192
ONE_GPU_EACH = (
    "Weft's workers compute on one GPU each so far: layouts over several are arithmetic, not something to start."
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The command's options; 0 and "auto" leave it to the planner."""

    model: str
    gpu: str
    gpus: int
    tp: int
    pp: int
    ep: int
    dtype: str
    weight_format: str
    context: int
    batch: int
    chunk_tokens: int
    draft: str = DraftChoice.NONE


def run_plan(options: PlanOptions, console: Console | None = None) -> int:
    """Print the tables; returns the exit status: 0 fits, 1 does not, 2 cannot be asked."""
    console = console or Console()
    try:
        target = _read(options.model)
        draft = _read_draft(options.draft, target)
        config = with_draft(target, draft.layer) if draft else target
        demand = _demand(options, config)
        if draft is not None:
            demand = replace(demand, draft=draft_size(draft, demand.dtype))
        plans = [make_plan(config, layout, demand) for layout in _layouts(options, config)]
    except (BadCheckpoint, BadPlan, StorageUnavailable) as error:
        said = Text(f"weft plan: {error}", style="red")  # as it is: brackets in a path are no markup
        Console(stderr=True).print(said, soft_wrap=True)
        return 2
    best = _best(plans)
    console.print(_heading(config, demand, best), highlight=False)
    console.print(_comparison(plans, demand))
    console.print(_arithmetic(config, demand, best))
    if options.gpus > 1:
        console.print(ONE_GPU_EACH, style="yellow")
    if not best.fits:
        console.print("It does not fit: take more GPUs, larger ones, or another layout.", style="red")
    return 0 if best.fits else 1


def _best(plans: list[CapacityPlan]) -> CapacityPlan:
    return max(plans, key=lambda plan: (plan.max_context, -plan.layout.pp, -plan.layout.ep))


def _read(place: str) -> ModelConfig:
    """Read a directory, its config.json, or the configuration of the Hub's model of this name."""
    if name := hub_name(place):
        return read_config(fetch_config(name))
    model = Path(place)
    is_file = os.path.isfile(model)  # isfile raises nothing: read_config reports a path that cannot be read
    if is_file and model.name != "config.json":
        raise BadCheckpoint(f"{model}: expected a checkpoint directory or its config.json; it {foreign_path(model)}")
    return read_config(model.parent if is_file else model)


def _read_draft(draft: str, target: ModelConfig) -> DraftConfig | MtpConfig | None:
    """Read a draft head from its directory, or from the Hub after fetching it; as the model's layer, by its config."""
    if draft == DraftChoice.MTP:
        return planned_mtp(target)
    if not names_draft_head(draft):
        return None
    directory = fetched(draft, fetch_with_display)
    return read_draft_checkpoint(Path(directory), target).config


def _demand(options: PlanOptions, config: ModelConfig) -> Demand:
    if options.gpu not in GPUS:
        raise BadPlan(f"--gpu: {options.gpu!r} is not known; known: {', '.join(GPUS)}")
    if options.context > config.max_positions:
        raise BadPlan(f"--context: {options.context} is more than the model's {config.max_positions} positions")
    # as workers on a GPU have it
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    return Demand(
        gpu=GPUS[options.gpu],
        num_gpus=options.gpus,
        context=options.context or min(DEFAULT_CONTEXT, config.max_positions),
        dtype=dtype,
        chunk_tokens=options.chunk_tokens,
        batch=options.batch,
        is_resident=options.weight_format == "packed12" and dtype == "bfloat16",  # no other is packed
    )


def _layouts(options: PlanOptions, config: ModelConfig) -> list[Layout]:
    """Return the layouts that the options allow. Raises BadPlan if there is none."""
    asked = {"tp": options.tp, "pp": options.pp, "ep": options.ep}
    named = {name: value for name, value in asked.items() if value}
    found = [
        layout
        for layout in layouts(config, options.gpus)
        if all(getattr(layout, name) == value for name, value in named.items())
    ]
    if not found:
        check_layout(config, Layout(**named), options.gpus)
        raise BadPlan(f"--gpus: no layout of {config.num_heads} heads divides evenly over {options.gpus} GPUs")
    return found


def _heading(config: ModelConfig, demand: Demand, plan: CapacityPlan) -> str:
    weights = plan.roofline.weights.values()
    stored = sum(weight.size_bytes for weight in weights)
    params = sum(weight.params for weight in weights)
    kind, how = demand.dtype, config.quantization
    if how is not None:
        kind = f"{kind} out of {how.packing.upper()}" if how.is_expanded else how.packing.upper()
    kind += ", matrices as F12" if demand.is_resident else ""
    name = f"{config.architecture} on {demand.num_gpus} x {demand.gpu.name}"
    return f"[bold]{name}[/bold]: {params / 1e9:.2f} B parameters, {_gib(stored)} as {kind}, KV in {demand.dtype}"


def _comparison(plans: list[CapacityPlan], demand: Demand) -> Table:
    title = (
        f"Layouts: GiB a GPU in the fullest stage; limits, not promises, for sequences of {demand.context:,} tokens,"
        f" decode at batch {demand.batch} or all that fit"
    )
    # narrow enough for every digit to be seen in 80 columns
    table = Table(title=title, box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    columns = ("layout", "weights", "left\nfor KV", "KV of\nall", "context\nthat fits", "seqs\nthat fit")
    for name in (*columns, "decode\ntok/s", "prefill\ntok/s"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for plan in plans:
        stage = plan.tightest
        decode = [f"{rate:,.0f}" for batch, rate in plan.decode if batch <= demand.batch]
        table.add_row(
            str(plan.layout),
            *(f"{part / GIB:.2f}" for part in (stage.weights, stage.kv)),
            f"{plan.kv_gib:,.0f}",
            _tokens(plan.max_context) if plan.fits else "none",
            f"{plan.sequences:,}",
            decode[-1] if decode else "-",
            f"{plan.prefill:,.0f}" if plan.fits else "-",
            style="" if plan.fits else "dim",
        )
    return table


def _arithmetic(config: ModelConfig, demand: Demand, plan: CapacityPlan) -> Table:
    stage, layout = plan.tightest, plan.layout
    title = f"{layout}, one GPU of the fullest stage (layers {stage.layers.start} to {stage.layers.stop - 1})"
    table = Table(title=title, box=SIMPLE_HEAD, show_header=False)
    for is_sum in (False, True, False):
        table.add_column(no_wrap=not is_sum)
    for line in _weight_lines(config, demand, plan, stage):
        table.add_row(*line)
    parts = [f"runtime {_gib(RUNTIME_BYTES)}"]
    parts += [f"communication {_gib(COMMUNICATION_BYTES)}"] if layout.num_gpus > 1 else []
    chunk = f"of {demand.chunk_tokens:,} prompt tokens a step, logits of {demand.batch:,} rows"
    table.add_row("activations", chunk, _gib(stage.activations))
    taken = [stage.memory, stage.weights, stage.activations, stage.reserve]
    if stage.features and (draft := demand.draft):
        kept, stepped = feature_rows(demand.block_tokens), step_rows(demand.chunk_tokens, demand.batch)
        rows = f"{kept} x {demand.batch:,} + {stepped:,} rows"
        size = f"{draft.num_features} x {config.hidden_size:,} x {ITEM_BYTES[demand.dtype]} B"
        table.add_row("draft features", f"{rows} x {size}", _gib(stage.features))
        taken.insert(3, stage.features)
    table.add_row("reserve", " + ".join(parts), _gib(stage.reserve))
    sums = " - ".join(f"{part / GIB:.2f}" for part in taken)
    table.add_row("left for KV", sums, _gib(stage.kv), end_section=True)
    for line in [*_kv_lines(config, demand, plan, stage), *_limit_lines(demand, plan, stage)]:
        table.add_row(*line)
    return table


def _weight_lines(
    config: ModelConfig, demand: Demand, plan: CapacityPlan, stage: PipelineStage
) -> list[tuple[str, str, str]]:
    total: dict[TensorKind, int] = {}
    for kind, weight in on_stage(config, plan.roofline.weights, stage.layers):
        total[kind] = total.get(kind, 0) + weight.size_bytes
    lines = []
    for kind, size in total.items():
        part = share(config, plan.layout, kind, size)
        lines.append((f"weights: {kind}", f"{_gib(size)} / {round(size / part)}", _gib(part)))
    if demand.draft and stage.layers.stop == config.num_layers:
        lines.append(("weights: draft model", "on each GPU", _gib(demand.draft.weight_bytes)))
    return [*lines, ("weights", "sum of these", _gib(stage.weights))]


def _kv_lines(
    config: ModelConfig, demand: Demand, plan: CapacityPlan, stage: PipelineStage
) -> list[tuple[str, str, str]]:
    paging, size = stage.paging, stage.paging.block_tokens
    page, group_layers = _page_parts(config, demand, plan, stage)
    lines = [("KV page", f"{page} x {size} tokens", _gib(stage.page))]
    if config.drafts and stage.layers.stop == config.num_layers:
        own = sum(token_numbers(config, layer, plan.layout.tp) for layer in config.drafts) * ITEM_BYTES[demand.dtype]
        lines.append(("draft KV", f"{own:,} B a token, in the same pages", _gib(own * size)))
    growing = sum(not reach.width for reach in paging.spans)
    if growing:
        made_of = f"{growing} x {group_layers}growing layers, a page each for {size} tokens"
        lines.append(("KV a token", made_of, _gib(growing * stage.page / size)))
    for reach in sorted({reach for reach in paging.spans if reach.width}, key=lambda each: each.width):
        most = paging.max_pages_decoding(paging.spans.index(reach))
        number = paging.spans.count(reach)
        made_of = f"{number} x {group_layers}layers that see {reach.width:,} tokens, at most {most:,} pages each"
        lines.append(("KV within windows", made_of, f"{_gib(number * most * stage.page)} a sequence"))
    if plan.fits and growing and plan.max_context != UNBOUNDED:
        bounded = paging.max_pages(plan.max_context) - growing * paging.num_blocks(plan.max_context)
        pages = f"{_gib(stage.kv)} are {stage.kv // stage.page:,} pages"
        left = f"({pages}, {bounded:,} for a prompt's windows)" if bounded else pages
        made_of = f"{left} / {growing} x {size}" + (", least of all stages" if len(plan.stages) > 1 else "")
        lines.append(("context that fits", made_of, f"{_tokens(plan.max_context)} tokens"))
        if plan.max_context > config.max_positions:
            lines.append(
                ("the model's own", "what it was made for, config.json says", f"{config.max_positions:,} tokens")
            )
    sequence = stage.kv_bytes_per_sequence(demand.context)
    made_of = f"{_gib(max(0, stage.kv))} / {_gib(sequence)}"
    if plan.layout.replicas > 1:
        made_of += f" x {plan.layout.replicas} replicas of the attention"
    lines.append((f"sequences of {demand.context:,}", made_of, f"{plan.sequences:,}"))
    return lines


def _page_parts(config: ModelConfig, demand: Demand, plan: CapacityPlan, stage: PipelineStage) -> tuple[str, str]:
    """Return what a token of a page is made of, and how many layers a group has; unlike layers are not counted."""
    token, item = stage.page // stage.paging.block_tokens, ITEM_BYTES[demand.dtype]
    kinds = {config.planes_of(layer) for layer in config.kv_layers}
    planes = kinds.pop()
    if kinds:
        return f"{token:,} B of the largest group", "groups of "
    heads, dims = -(-planes[0].heads // plan.layout.tp), [plane.dim for plane in planes]
    num_layers = token // (heads * sum(dims) * item)
    width = f"{len(dims)} x {dims[0]}" if len(set(dims)) == 1 else f"({' + '.join(map(str, dims))})"
    return f"{num_layers} layers x {heads} heads x {width} x {item} B", f"{num_layers} "


def _limit_lines(demand: Demand, plan: CapacityPlan, stage: PipelineStage) -> list[tuple[str, str, str]]:
    limits = plan.roofline
    steps = [(f"decode, batch {batch:,}", limits.decode_step(stage, batch), rate) for batch, rate in plan.decode]
    if plan.fits:
        steps.append((f"prefill, chunk {demand.chunk_tokens:,}", limits.prefill_step(stage), plan.prefill))
    return [(name, _roofline(demand, plan, stage, step), f"{rate:,.0f} tok/s") for name, step, rate in steps]


def _roofline(demand: Demand, plan: CapacityPlan, stage: PipelineStage, step: StepShape) -> str:
    read, computed = plan.roofline.read_bytes(stage, step), plan.roofline.operations(stage, step)
    rate = demand.gpu.fp32_tflops if demand.dtype == "float32" else demand.gpu.tflops
    memory, arithmetic = read / demand.gpu.bandwidth_tb / TERA * 1e3, computed / rate / TERA * 1e3
    return (
        f"max of {_gib(read)} / {demand.gpu.bandwidth_tb:g} TB/s = {memory:.3f} ms"
        f" and {computed / TERA:.3g} TFLOP / {rate:g} TFLOP/s = {arithmetic:.3f} ms"
    )


def _gib(size: float) -> str:
    """Return bytes in GiB, MiB or KiB, whichever shows at least a tenth."""
    if abs(size) >= GIB / 10:
        return f"{size / GIB:.2f} GiB"
    return f"{size * 1024 / GIB:.2f} MiB" if abs(size) >= GIB / 10240 else f"{size / 1024:.2f} KiB"


def _tokens(count: int) -> str:
    return "unbounded" if count == UNBOUNDED else f"{count:,}"
