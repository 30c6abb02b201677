"""Shape of an EAGLE-3.1 draft head and its checkpoint, in SpecForge's flat format.

The head is one decoder layer. Its input at position k is the fused features of position k and the embedding of token
k + 1; it predicts token k + 2. Embedding and output matrix are the target's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from training.weft_nano.model import ROPE_THETA

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """`boundaries`: the features are the residual stream before these layers; the layer count is after the last."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    boundaries: tuple[int, ...]

    @classmethod
    def like(cls, target: LlamaConfig, boundaries: tuple[int, ...]) -> HeadShape:
        """Return the shape of one layer of the target."""
        names = [name for name in cls.__dataclass_fields__ if name not in ("rope_theta", "boundaries")]
        sizes = {name: getattr(target, name) for name in names}
        return cls(**sizes, rope_theta=ROPE_THETA, boundaries=boundaries)


class FloatNorm(nn.RMSNorm):
    """Normalises in float32; torch has no fused norm of bfloat16 rows with float32 weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        kv_size = shape.num_key_value_heads * shape.head_dim
        q_size = shape.num_attention_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)


class Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class DraftLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = FloatNorm(size, eps)
        self.hidden_norm = FloatNorm(size, eps)
        self.post_attention_layernorm = FloatNorm(size, eps)


class DraftHead(nn.Module):
    """The modules have the names of the checkpoint's tensors. Vectors are [rows, ...]; a row is one position."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc_norm = nn.ModuleList(FloatNorm(size, eps) for _ in shape.boundaries)
        self.fc = nn.Linear(len(shape.boundaries) * size, size, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = FloatNorm(size, eps)
        powers = torch.arange(0, shape.head_dim, 2).double() / shape.head_dim
        self._frequencies = shape.rope_theta**-powers

    def fuse(self, features: tuple[Tensor, ...]) -> Tensor:
        """Return the state of each row from the target's features."""
        normed = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        result: Tensor = self.fc(torch.cat(normed, -1))
        return result

    def enter(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the input of the projections."""
        return torch.cat((self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(state)), -1)

    def query(self, entered: Tensor, positions: Tensor) -> Tensor:
        """Return [rows, heads, head_dim]."""
        return self._rotate(self._split(self.midlayer.self_attn.q_proj(entered)), positions)

    def key_value(self, entered: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [rows, kv heads, head_dim]."""
        attention = self.midlayer.self_attn
        key = self._rotate(self._split(attention.k_proj(entered)), positions)
        return key, self._split(attention.v_proj(entered))

    def leave(self, state: Tensor, attended: Tensor) -> Tensor:
        """Return the normed output, which gives the logits and is the state of the next draft."""
        layer = self.midlayer
        stream = state + layer.self_attn.o_proj(attended)
        result: Tensor = self.norm(stream + layer.mlp(layer.post_attention_layernorm(stream)))
        return result

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.shape.head_dim)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = (positions[:, None].double() * self._frequencies).float()[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def write_head(head: DraftHead, target: LlamaConfig, out: Path) -> None:
    """Write `config.json` and `model.safetensors` in bfloat16; each file is replaced in one move."""
    shape = asdict(head.shape)
    boundaries = shape.pop("boundaries")
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **shape,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "pad_token_id": target.pad_token_id,
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {
            # SpecForge's ids name layers and mean the stream behind each, so no id stands for boundary 0.
            "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in boundaries] if min(boundaries) else None,
            "boundaries": list(boundaries),
            "use_aux_hidden_state": True,
        },
        "torch_dtype": "bfloat16",
    }
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    temporary = out / "model.safetensors.part"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    partial = out / "config.json.part"
    partial.write_text(json.dumps(config, indent=2) + "\n")
    partial.replace(out / "config.json")
    temporary.replace(out / "model.safetensors")


def read_head(path: Path) -> DraftHead:
    """Read a head that `write_head` wrote, in float32."""
    config = json.loads((path / "config.json").read_text())
    sizes = {name: config[name] for name in HeadShape.__dataclass_fields__ if name != "boundaries"}
    eagle = config["eagle_config"]
    # Files without `boundaries` are older, and have these as their ids.
    boundaries = eagle.get("boundaries") or eagle["eagle_aux_hidden_state_layer_ids"]
    head = DraftHead(HeadShape(**sizes, boundaries=tuple(boundaries)))
    head.load_state_dict({name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()})
    return head
