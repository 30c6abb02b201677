"""A model as one frozen value: sizes, and which building blocks each of its layers is made of. No torch.

Families fill it in from config.json; the tensors' names and the forward pass follow from it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Latent attention makes keys and values of as many heads at a time as fit, for one sequence.
WORKSPACE_BYTES = 128 << 20
FINAL = -1  # the boundary behind the last norm, see `weft.model.step.Capture`


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `kind` is default, linear, llama3, yarn or longrope.

    linear reads the factor as well, llama3 the fields up to `original_max_positions`, yarn all but the freq factors.
    `attention_factor` multiplies cosine and sine. `pair_factors` divide the frequency of each pair (longrope).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    is_truncated: bool = True
    pair_factors: tuple[float, ...] = ()


class HeadNorm(StrEnum):
    """RMSNorm of queries and keys before rotation, with weights; PLAIN: without, after it, in rotated layers only.

    WEIGHTED norms every head for itself, WIDE all heads of a token together. LAST norms every head after rotation.
    """

    NONE = "none"
    WEIGHTED = "weighted"
    WIDE = "wide"
    PLAIN = "plain"
    LAST = "last"


class Activation(StrEnum):
    """Activation in every MLP: of the gate, or of the only projection into it. RELU2 is the square of ReLU."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"


@dataclass(frozen=True, slots=True)
class AttentionGate:
    """Attention's output times sigmoid or softplus of a projection of its input, one for each number or each head."""

    name: str
    is_softplus: bool = False
    is_per_head: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms; an empty name means that there is none.

    Norms of outputs come before the addition to the residual stream. `is_centered`: LayerNorm in place of RMSNorm, here
    and before the head, `has_bias` with biases. `is_parallel`: the MLP reads what attention reads, with its own norm if
    `mlp_input` names one.
    """

    attention_input: str = "input_layernorm"
    attention_output: str = ""
    mlp_input: str = "post_attention_layernorm"
    mlp_output: str = ""
    is_centered: bool = False
    has_bias: bool = False
    is_parallel: bool = False


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries times 1 + scale * log(1 + floor((position + shift) / floor)), in unrotated layers or in all layers."""

    floor: float
    scale: float
    shift: int = 1
    is_everywhere: bool = False


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: keys and values of all heads come out of `kv_rank` numbers a token.

    `rope_dim` more numbers, rotated, are one further key part for all heads. `q_rank` 0: queries are not factored.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float

    @property
    def min_expanded_rows(self) -> int:
        """Smallest number of rows for which expanding keys and values costs fewer multiplications, for any context."""
        absorbed = 2 * self.kv_rank + self.rope_dim
        expansion = self.kv_rank * (self.nope_dim + self.value_dim)
        return expansion // (absorbed - 2 * self.expanded_dim) + 1 if absorbed > 2 * self.expanded_dim else 1 << 62

    @property
    def expanded_dim(self) -> int:
        """Width of an expanded key and value of one head: that of the wider one."""
        return max(self.nope_dim + self.rope_dim, self.value_dim)

    def expanded_heads(self, num_heads: int, num_tokens: int, item_bytes: int) -> int:
        """Return how many heads are expanded at a time for this context: as many as fit, in equal parts."""
        fitting = max(1, WORKSPACE_BYTES // (2 * num_tokens * self.expanded_dim * item_bytes))
        return next(count for count in range(min(num_heads, fitting), 0, -1) if num_heads % count == 0)


class Scoring(StrEnum):
    """How a router's logits become weights; see `weft_kernels.moe_routing`."""

    SOFTMAX = "softmax"
    SOFTMAX_BIASED = "softmax, chosen with a bias"
    SIGMOID_INPUT = "sigmoid of the chosen, on the input"
    SIGMOID_GROUPS = "biased sigmoid, best groups first"


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. `shared_size` > 0: one more expert for every token, its output added as it is, or times the
    sigmoid of the projection `shared_gate` if that is named.

    Names: `router`, `bias` (added to scores for the choice alone), `projections` (gate, up, down) of each expert,
    `shared`. `is_bias_row`: the bias is stored as [1, E]. `is_fused`: all experts of a layer in two tensors,
    gate_up_proj [E, hidden, 2 size] and down_proj [E, size, hidden]; with `is_output_first` each expert's matrices are
    stored as linear modules are, [E, 2 size, hidden] and [E, hidden, size].

    - `is_interleaved`: gate and up alternate in gate_up_proj. `is_biased`: the router and both tensors have biases,
      `bias` of the router, gate_up_proj_bias [E, 2 size] and down_proj_bias [E, hidden].
    - `swiglu_limit` > 0: the activation is `weft_kernels.moe.ClampedSwiGlu`.
    """

    num_experts: int
    top_k: int
    size: int
    scoring: Scoring = Scoring.SOFTMAX
    is_renormalised: bool = True
    factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    shared_size: int = 0
    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    is_bias_row: bool = False
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    shared_gate: str = ""
    is_fused: bool = False
    is_output_first: bool = False
    is_interleaved: bool = False
    is_biased: bool = False
    swiglu_alpha: float = 1.0
    swiglu_limit: float = 0.0

    @property
    def has_bias(self) -> bool:
        """True if each expert has a bias for the choice."""
        return self.scoring in (Scoring.SIGMOID_GROUPS, Scoring.SOFTMAX_BIASED)


@dataclass(frozen=True, slots=True)
class Plane:
    """Vectors that a layer keeps of each token: one of `dim` numbers for each of `heads` key heads."""

    name: str
    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer. A query sees its last `window` keys, or those of its own aligned `chunk`.

    `planes`: the layer's KV if it is not the model's; all with one number of heads.
    """

    window: int = 0
    chunk: int = 0
    is_rotated: bool = True
    has_experts: bool = False
    planes: tuple[Plane, ...] = ()


class Packing(StrEnum):
    """How a linear module's tensors hold its weights.

    FP8: E4M3 weights with a factor for each block, an exponent of two in MXFP8. INT8: bytes with a factor for each
    row. INT4: compressed-tensors' words of int32, with a factor for each group. GPTQ and AWQ: words of the transposed
    weight, along its inputs and its outputs. FP4: E2M1 weights with a factor for each group, and in NVFP4 one of the
    whole tensor. MXFP4_EXPERTS: two tensors hold a layer's fused experts, and linear modules are plain. BITSANDBYTES:
    codes of a table of 16 values, with a factor for each 64 weights of the flat matrix.
    """

    FP8_BLOCKS = "fp8"
    MXFP8 = "mxfp8"
    INT4_GROUPS = "int4"
    GPTQ = "gptq"
    AWQ = "awq"
    INT8 = "int8"
    NVFP4 = "nvfp4"
    NVFP4_MODELOPT = "nvfp4 of modelopt"
    MXFP4 = "mxfp4"
    MXFP4_QUARK = "mxfp4 of quark"
    MXFP4_EXPERTS = "mxfp4 experts"
    BITSANDBYTES = "bitsandbytes"


FP8_KERNELS = (Packing.FP8_BLOCKS, Packing.MXFP8)
INT4_KERNELS = (Packing.INT4_GROUPS, Packing.GPTQ, Packing.AWQ)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How linear weights are stored. `skipped` are regular expressions over names of modules that are not packed.

    - `block`: rows and columns that share a factor; 0 means all of them.
    - `scale`: last part of the name of FP8's factors, or of bitsandbytes' description of a weight.
    - `bits`, `is_symmetric`: of integers; without symmetry each group has a zero point.
    - `is_ordered`: a tensor names the group of each column. `zero_offset`: added to stored zero points.
    - `is_nested`: the factors are quantized too (bitsandbytes).
    """

    packing: Packing
    block: tuple[int, int]
    skipped: tuple[str, ...] = ()
    scale: str = "weight_scale_inv"
    bits: int = 4
    is_symmetric: bool = True
    is_ordered: bool = False
    zero_offset: int = 0
    is_nested: bool = False

    @property
    def is_expanded(self) -> bool:
        """True if no kernel multiplies these weights, so that loading makes plain matrices of them."""
        is_int4 = self.packing in INT4_KERNELS and self.bits == 4 and not self.is_ordered
        return not is_int4 and self.packing not in FP8_KERNELS

    @property
    def is_of_experts(self) -> bool:
        """True if fused experts alone are packed."""
        return self.packing is Packing.MXFP4_EXPERTS


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model. `dtype` is what the checkpoint's tensors are meant to be, not what they run in.

    `num_kv_heads` and `head_dim` are those of the cache. `drafts`: layers behind the model's that predict further
    tokens; their KV lies in the model's pages.
    `prefix` stands before every tensor's name; tensors that begin with one of `ignored` are not the text model's.
    `renamed`: pairs of a part of our names and what a checkpoint has in its place, replaced one after the other.

    - `rotary_dim`: leading numbers of each head that are rotated; 0 means all. `is_interleaved`: neighbours are pairs.
      `is_rotated_wide`: rotation runs in float32 for every dtype of the heads.
    - `local_rope`, `local_rotary_dim`, `local_num_heads`: of the layers that have a window, if they are others.
    - `has_sinks`: each query head has a learned logit that joins the softmax's denominator.
    - `has_mlp_bias`: of dense layers. `is_gated` False: MLPs have no gate_proj, and an activation after up_proj.
    - `norm_offset`: added to the weights of all norms. `is_qkv_fused`, `is_gate_up_fused`: stored as one matrix.
    - `embedding_scale`, `residual_scale`, `logit_scale`: factors of the embeddings, of what each attention and MLP adds
      to the residual stream, and of the logits. `attention_scale`: factor of the scores; 0 means head_dim ** -0.5.
    - `logit_softcap` > 0: logits become softcap * tanh(logits / softcap).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    is_tied: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    drafts: tuple[LayerSpec, ...] = ()
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_sinks: bool = False
    has_mlp_bias: bool = False
    is_gated: bool = True
    is_qkv_fused: bool = False
    is_gate_up_fused: bool = False
    head_norm: HeadNorm = HeadNorm.NONE
    norms: Norms = Norms()
    norm_offset: float = 0.0
    activation: Activation = Activation.SILU
    rotary_dim: int = 0
    local_rope: Rope | None = None
    local_rotary_dim: int = 0
    local_num_heads: int = 0
    attention_gate: AttentionGate | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    attention_scale: float = 0.0
    temperature: Temperature | None = None
    is_interleaved: bool = False
    is_rotated_wide: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    quantization: Quantization | None = None
    mlp_name: str = "mlp"
    prefix: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without layers that predict further tokens."""
        return len(self.layers)

    @property
    def kv_layers(self) -> tuple[LayerSpec, ...]:
        """All layers that keep KV: the model's, then the drafts."""
        return self.layers + self.drafts

    def planes_of(self, layer: LayerSpec) -> tuple[Plane, ...]:
        """Return what a layer keeps of each token: keys and values, or in latent attention one vector for both."""
        names = ("c",) if self.latent else ("k", "v")
        return layer.planes or tuple(Plane(name, self.num_kv_heads, self.head_dim) for name in names)

    @property
    def rotated_dim(self) -> int:
        """Numbers of each head that are rotated."""
        return self.latent.rope_dim if self.latent else self.rotary_dim or self.head_dim

    @property
    def local_rotated_dim(self) -> int:
        """Numbers of each head that are rotated in layers with a window."""
        return self.local_rotary_dim or self.rotated_dim

    def num_heads_with(self, window: int) -> int:
        """Query heads of a layer with this window; 0 for none."""
        return self.local_num_heads if window and self.local_num_heads else self.num_heads
