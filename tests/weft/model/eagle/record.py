"""Record tiny random draft heads: files as each project writes them, and what its own code computes with them.

    python -m tests.weft.model.eagle.record FORMAT PATH...

FORMAT is one of `RECORDERS`. PATH is prepended to sys.path: a checkout of SafeAILab/EAGLE (folder eagle/model), of
sgl-project/SpecForge, or of NVIDIA/Model-Optimizer (folder modelopt/torch/speculative/plugins), or a folder into which
pip installed speculators. The tests read the files and need none of these packages.

Weights are bfloat16, computation is float32. A file holds the head's tensors as `head.NAME`, those of the target as
`target.NAME`, and config.json as metadata. `features` [T, 3, H] and `tokens` [T] are the prompt, row k pairs the
feature of token k with token k+1. Behind it come STEPS rows with the last state and the most likely token.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

FOLDER = Path(__file__).parent
PROMPT, STEPS, VOCABULARY, DRAFT_VOCABULARY, HIDDEN, LAYERS = 12, 5, 128, 48, 64, 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ROPE = {"rope_theta": 10_000.0}
LAYER_IDS = [1, LAYERS // 2 - 1, LAYERS - 4]


@dataclass(frozen=True)
class Recorded:
    """A head. `layer` maps states and embeddings [1, T, H] of all rows so far to states; `recycle` and `logits` follow.

    `d2t`: of its reduced vocabulary, None for a full one.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor
    output: Tensor
    d2t: Tensor | None
    fuse: Callable[[Tensor], Tensor]
    layer: Callable[[Tensor, Tensor], Tensor]
    recycle: Callable[[Tensor], Tensor]
    normed: Callable[[Tensor], Tensor]


def randomise(module: torch.nn.Module) -> None:
    """Norms far from one, so that a missing one shows, and matrices that mix well; all exact in bfloat16."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in sorted(module.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        values = values * 0.2 + (1 if "norm" in name and parameter.ndim == 1 else 0)
        parameter.data = (values if parameter.ndim == 1 else values * 0.7).bfloat16().float()


def draft_map() -> Tensor:
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCABULARY].sort().values
    return ids - torch.arange(DRAFT_VOCABULARY)


def causal(count: int) -> Tensor:
    return torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]


def random_matrix(rows: int, seed: int) -> Tensor:
    values = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.3
    return values.bfloat16().float()


def halved(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def write(name: str, head: Recorded) -> None:
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(PROMPT, 3, HIDDEN, generator=generator) * torch.tensor([0.5, 1.0, 2.0])[:, None]
    tokens = torch.randint(VOCABULARY, (PROMPT,), generator=generator)
    fused = head.fuse(features.flatten(1)[None])
    states, ids, found, logits = fused, tokens[None], [], []
    for step in range(STEPS + 1):
        out = head.recycle(head.layer(states, head.embedding[ids]))
        rows = out if step == 0 else out[:, -1:]
        found.append(rows[0])
        logits.append(head.normed(rows)[0] @ head.output.T)
        draft = logits[-1][-1].argmax()
        token = draft if head.d2t is None else draft + head.d2t[draft]
        states, ids = torch.cat((states, rows[:, -1:]), 1), torch.cat((ids, token.view(1, 1)), 1)
    saved = {
        f"head.{key}": value.bfloat16() if value.is_floating_point() else value for key, value in head.tensors.items()
    }
    for key, matrix in (("embed_tokens", head.embedding), ("lm_head", head.output)):
        if f"{key}.weight" not in head.tensors:
            saved[f"target.{key}"] = halved(matrix)
    saved |= {"features": features, "tokens": ids[0, :-1], "fused": fused[0], "states": torch.cat(found)}
    saved["logits"] = torch.cat(logits)
    saved = {key: value.detach().contiguous() for key, value in saved.items()}
    save_file(saved, FOLDER / f"{name}.safetensors", {"config": json.dumps(head.config)})


def record_safeai() -> None:
    """The head of the paper's code, with an embedding of its own and a reduced vocabulary."""
    module = import_module("cnets")
    config = {**SIZES, **ROPE, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCABULARY}
    fields = {**config, "pad_token_id": 0, "hidden_act": "silu", "pretraining_tp": 1, "rope_scaling": None}
    model = module.Model(SimpleNamespace(**fields))
    randomise(model)
    model.d2t.copy_(draft_map())
    model.eval()

    def layer(states: Tensor, embedded: Tensor) -> Tensor:
        positions = torch.arange(states.shape[1])[None]
        out: Tensor = model.midlayer(embedded, states, causal(states.shape[1]), positions, use_cache=True)[0]
        return out

    tensors = {key: value for key, value in model.state_dict().items() if "rotary" not in key}
    head = Recorded(
        config, tensors, model.embed_tokens.weight, model.lm_head.weight, model.d2t, model.fc, layer, plain, model.norm
    )
    write("safeai", head)


def record_specforge() -> None:
    """Heads of SpecForge: EAGLE-3 with ids, and EAGLE-3.1 with the full vocabulary and the target's matrices.

    In 3.1 the next step reads the normed state, as SpecForge does since its pull request 879, vLLM and SGLang.
    """
    module = import_module("specforge.modeling.draft.llama3_eagle")
    for name, is_newer in (("specforge", False), ("specforge31", True)):
        size = VOCABULARY if is_newer else DRAFT_VOCABULARY
        config = {
            **SIZES,
            **ROPE,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": size,
            "head_dim": 32,
        }
        config |= {"fc_norm": True, "norm_output": True} if is_newer else {}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": LAYER_IDS, "use_aux_hidden_state": True}
        model = module.LlamaForCausalLMEagle3(LlamaConfig(**config, pad_token_id=0))
        randomise(model)
        if not is_newer:
            model.d2t.copy_(draft_map())
        embedding = random_matrix(VOCABULARY, 21)
        output = random_matrix(VOCABULARY, 22) if is_newer else model.lm_head.weight
        skipped = ("embed_tokens", "lm_head", "d2t", "t2d") if is_newer else ("embed_tokens",)
        tensors = {key: value for key, value in model.state_dict().items() if not key.startswith(skipped)}

        def layer(states: Tensor, embedded: Tensor, model: Any = model) -> Tensor:
            positions = torch.arange(states.shape[1])[None]
            out: Tensor = model.backbone(embedded, states, None, None, positions)
            return out

        recycle, normed = (model.norm, plain) if is_newer else (plain, model.norm)
        d2t, fuse = None if is_newer else model.d2t, model.project_hidden_states
        write(name, Recorded(config, tensors, embedding, output, d2t, fuse, layer, recycle, normed))


SPECULATORS: dict[str, tuple[type, dict[str, Any]]] = {
    "speculators": (LlamaConfig, {"norm_before_residual": True}),
    "speculators-qwen3": (Qwen3Config, {"norm_before_residual": False, "norm_before_fc": True}),
    "speculators31": (LlamaConfig, {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
}


def record_speculators() -> None:
    """Heads of speculators, saved with its own writer of config.json."""
    module = import_module("speculators.models.eagle3")
    parts = import_module("speculators.config")
    proposal = import_module("speculators.proposals.greedy").GreedyTokenProposalConfig
    for name, (layer_class, flags) in SPECULATORS.items():
        inner = layer_class(**SIZES, rope_theta=10_000.0, head_dim=32, attention_bias=name == "speculators31")
        inner._attn_implementation = "eager"
        verifier = parts.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
        methods = [proposal(speculative_tokens=3)]
        common = parts.SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=methods, default_proposal_method="greedy", verifier=verifier
        )
        config = module.Eagle3SpeculatorConfig(
            transformer_layer_config=inner,
            draft_vocab_size=DRAFT_VOCABULARY,
            eagle_aux_hidden_state_layer_ids=[2, LAYERS // 2, LAYERS - 3],
            speculators_config=common,
            **flags,
        )
        model = module.Eagle3DraftModel(config)
        randomise(model)
        model.d2t = draft_map()
        model.t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
        model.t2d[model.d2t + torch.arange(DRAFT_VOCABULARY)] = True
        kept = model.state_dict() | {"d2t": model.d2t, "t2d": model.t2d}
        tensors = {key: value for key, value in kept.items() if not key.startswith("verifier")}

        def fuse(features: Tensor, model: Any = model) -> Tensor:
            if model.input_norm is not None:
                features = model.input_norm(features)
            if model.fc_norm is not None:
                chunks = zip(model.fc_norm, features.chunk(3, dim=-1), strict=True)
                features = torch.cat([norm(chunk) for norm, chunk in chunks], dim=-1)
            fused: Tensor = model.fc(features)
            return fused

        def layer(states: Tensor, embedded: Tensor, model: Any = model) -> Tensor:
            x, positions = torch.cat((embedded, states), dim=-1), torch.arange(states.shape[1])[None]
            angles = model.rotary_emb(x, positions)
            mask = causal(states.shape[1])
            out: Tensor = model.layers[0](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
            return out

        is_normed = config.norm_output
        recycle, normed = (model.norm, plain) if is_normed else (plain, model.norm)
        saved = json.loads(config.to_json_string())
        head = Recorded(
            saved, tensors, model.embed_tokens.weight, model.lm_head.weight, model.d2t, fuse, layer, recycle, normed
        )
        write(name, head)


class EmbeddingNorm(torch.nn.Module):
    """Norms the embeddings, and leaves the state as it is.

    ModelOpt puts the embedding's norm where a layer of transformers finds the norm of its input. So the layer applies
    it to the state, too, before `hidden_norm`. ModelOpt's comment calls this norm disabled; its flow for Megatron has
    none, nor have vLLM and TensorRT-LLM, which serve these heads.
    """

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.embedded: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x) if x is self.embedded else x
        return out


def record_modelopt() -> None:
    """Heads of ModelOpt: a Llama layer, and a layer with latent attention as for Kimi."""
    module = import_module("modeling_eagle")
    llama = import_module("transformers.models.llama.modeling_llama").LlamaDecoderLayer
    rotary = import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding
    latent = import_module("transformers.models.deepseek_v3.modeling_deepseek_v3").DeepseekV3DecoderLayer
    flags: dict[str, Any] = {
        "use_aux_hidden_state": True,
        "use_last_layernorm": True,
        "use_input_layernorm_in_first_layer": True,
    }
    flags |= {"use_mtp_layernorm": False, "parallel_draft_step": 1, "eagle_aux_hidden_state_layer_ids": LAYER_IDS}
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    ranks |= {"first_k_dense_replace": 1, "num_key_value_heads": 4}
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
    }
    scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10_000.0}
    cases: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
        "modelopt": (LlamaConfig, llama, "LlamaForCausalLMEagle3", {**ROPE, "head_dim": 32}),
        "kimi": (DeepseekV3Config, latent, "Eagle3DeepseekV2ForCausalLM", {**ranks, "rope_scaling": scaling}),
    }
    for name, (config_class, layer_class, architecture, own) in cases.items():
        ids = [2, LAYERS // 2, LAYERS - 3] if name == "kimi" else LAYER_IDS
        eagle = {**flags, "eagle_aux_hidden_state_layer_ids": ids}
        config = {**SIZES, **own, "architectures": [architecture], "draft_vocab_size": DRAFT_VOCABULARY}
        fields = {"eagle_decoder_type": "llama", "has_lm_head": True, "draft_vocab_size": DRAFT_VOCABULARY}
        inner = config_class(**SIZES | own, **fields, **eagle)
        inner._attn_implementation = "eager"
        model = module.EagleModule(inner, layer_class)
        model.rotary_emb = rotary(inner)  # the module's own call does not suit current versions of transformers
        randomise(model)
        model.d2t.copy_(draft_map())

        tensors = dict(model.state_dict())
        norm = model.layers[0].input_layernorm = EmbeddingNorm(model.layers[0].input_layernorm)

        def layer(states: Tensor, embedded: Tensor, model: Any = model, norm: EmbeddingNorm = norm) -> Tensor:
            norm.embedded = embedded
            out: Tensor = model(states, embedded, causal(states.shape[1]))[1]
            return out

        embedding = random_matrix(VOCABULARY, 23)
        head = Recorded(
            {**config, "eagle_config": eagle},
            tensors,
            embedding,
            model.lm_head.weight,
            model.d2t,
            model.fc,
            layer,
            plain,
            model.norm,
        )
        write(name, head)


def plain(states: Tensor) -> Tensor:
    return states


RECORDERS: dict[str, Callable[[], None]] = {
    "safeai": record_safeai,
    "specforge": record_specforge,
    "speculators": record_speculators,
    "modelopt": record_modelopt,
}


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]
    with torch.no_grad():
        RECORDERS[sys.argv[1]]()
