"""Writes tiny models as GGUF with the package `gguf`: its names of tensors and keys, llama.cpp's order of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

from tests.weft.tiny_families import TinyFamily

CONTROL = gguf.TokenType.CONTROL.value
NORMAL = gguf.TokenType.NORMAL.value
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Each joins what one of the rules of splitting keeps apart.
MERGES = (
    "1 2",
    "Ġ 1",
    "a 1",
    "Ċ Ċ",
    "h e",
    "Ġ he",
    "' s",
    "' S",
    "A b",
    "a B",
    "s !",
    "! !",
    "Ġ Ġ",
    "3 4",
    "12 34",
    "/ Ċ",
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@dataclass(frozen=True)
class GgufForm:
    """How llama.cpp stores a family: the name of its architecture, and what differs from a plain Llama.

    more: keys of the architecture with their values. tensors: further tensors.
    """

    architecture: str
    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    is_permuted: bool = False
    norm_offset: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, list[float]] = field(default_factory=dict)


def byte_tokens() -> list[str]:
    """A byte-level vocabulary of 256 bytes, one token for each merge, and three special ones."""
    return [*sorted(ByteLevel.alphabet()), *("".join(each.split(" ")) for each in MERGES), *SPECIAL]


VOCAB_SIZE = len(byte_tokens())


def add_byte_level(writer: Any, pre: str = "smollm") -> None:
    """Write a byte-level tokenizer that splits text by the rule `pre`."""
    tokens = byte_tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if each in SPECIAL else NORMAL for each in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE)


def write_gguf(path: Path, tiny: TinyFamily, form: GgufForm, kind: str = "F32", add_tokenizer: Any = None) -> None:
    """Write a model. Matrices get the type `kind`, vectors stay F32 as in llama.cpp."""
    writer = gguf.GGUFWriter(path, form.architecture)
    _add_sizes(writer, tiny.oracle.config)
    for key, value in form.more.items():
        writer.add_key_value(f"{form.architecture}.{key}", value, _value_type(value), _item_type(value))
    (add_tokenizer or add_byte_level)(writer)
    for name, values in form.tensors.items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    for name, tensor in _gguf_tensors(tiny, form).items():
        is_vector = tensor.ndim == 1
        dtype = gguf.GGMLQuantizationType["F32" if is_vector else kind]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(tensor.numpy()), dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
    parameters = config.rope_parameters
    writer.add_rope_freq_base(parameters.get("full_attention", parameters)["rope_theta"])


def _value_type(value: Any) -> Any:
    return gguf.GGUFValueType.ARRAY if isinstance(value, list) else gguf.GGUFValueType.get_type(value)


def _item_type(value: Any) -> Any:
    return gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None


def _gguf_tensors(tiny: TinyFamily, form: GgufForm) -> dict[str, torch.Tensor]:
    architecture = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == form.architecture)
    names = gguf.get_tensor_name_map(architecture, tiny.config.num_layers)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _stacked(tiny).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if form.is_permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.reshape(-1, 2, tiny.config.head_dim // 2, *tensor.shape[1:])
            tensor = heads.swapaxes(1, 2).reshape(tensor.shape)
        found[gguf_name] = tensor + form.norm_offset if name.endswith("norm.weight") else tensor
    return found


def _stacked(tiny: TinyFamily) -> dict[str, torch.Tensor]:
    """Return the tensors with the experts of a layer as one, as llama.cpp has them."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tiny.weights.items():
        before, _, after = name.partition(".experts.")
        if not after:
            found[name] = tensor
            continue
        number, _, rest = after.partition(".")
        before = before.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        stacked = f"{before}.experts.{rest}" if "feed_forward" in before else f"model.{before}.experts.{rest}"
        experts.setdefault(stacked, {})[int(number)] = tensor
    return {**found, **{name: torch.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}}
