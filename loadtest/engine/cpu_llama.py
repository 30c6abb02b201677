"""llama.cpp in the CPU comparison, through its C interface: all sequences in one batch a step, greedy.

Runs in an environment of its own, with llama-cpp-python, gguf and numpy, and writes the model as float16 or bfloat16
GGUF beside the checkpoint the first time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from loadtest.engine.cpu_task import VOCAB_SIZE, Report, Task, read_task

LEAST_ROWS = 2048  # that a call takes, llama.cpp's default; more where a prompt is longer
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def read_bfloat16(path: Path) -> Iterator[tuple[str, Any]]:
    """The tensors of a safetensors file as float32."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    size = int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8 : 8 + size])).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            halves = np.frombuffer(bytes(data[start:end]), dtype=np.uint16)
            yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def _no_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("none")


def convert(folder: Path, dtype: str, add_tokenizer: Callable[[Any], None] = _no_tokenizer) -> Path:
    """The checkpoint as GGUF, made once; `add_tokenizer` writes one into it."""
    path = folder / f"model-{dtype}.gguf"
    if path.exists():
        return path
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    add_tokenizer(writer)
    for name, tensor in read_bfloat16(folder / "model.safetensors"):
        name, tensor = _to_gguf(name, tensor, config["head_dim"])
        if tensor.ndim == 1:  # norms stay float32
            writer.add_tensor(name, tensor)
        elif dtype == "bfloat16":
            halves = (tensor.view(np.uint32) >> 16).astype(np.uint16)  # exact: that is what the checkpoint holds
            writer.add_tensor(name, halves.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _to_gguf(name: str, tensor: Any, head_dim: int) -> tuple[str, Any]:
    """llama.cpp rotates neighbouring pairs where checkpoints rotate halves: rows of queries and keys move."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = tensor.reshape(-1, 2, head_dim // 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    if name.startswith("model.layers."):
        _, _, index, rest = name.split(".", 3)
        return f"blk.{index}.{NAMES[rest]}", np.ascontiguousarray(tensor)
    return NAMES[name], tensor


class Llama:
    """A model, and a context with room for so many sequences of one length.

    Their keys and values lie in one buffer (`is_unified`), where a row's attention passes over everybody's, or in one
    each; which is quicker depends on the batch.
    """

    def __init__(self, task: Task, path: Path) -> None:
        self.clock = task.clock
        self.threads = task.threads
        self.most_rows = max(LEAST_ROWS, task.prompt_tokens, task.prefill_tokens, *task.batches)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        self.batch = llama_cpp.llama_batch_init(self.most_rows, 0, 1)
        self.context: Any = None

    def open(self, sequences: int, tokens: int, *, is_unified: bool) -> None:
        """A new context in place of the one before."""
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_ctx = sequences * -(-tokens // 256) * 256  # whole steps of its own for each
        params.n_batch, params.n_ubatch = self.most_rows, 512
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = is_unified
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"no context for {sequences} sequences of {tokens} tokens")

    def run(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, wants logits): the best next token of those that want logits."""
        self.batch.n_tokens = len(tokens)
        for index, (token, position, sequence, is_wanted) in enumerate(tokens):
            self.batch.token[index], self.batch.pos[index] = token, position
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, sequence
            self.batch.logits[index] = is_wanted
        if llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        wanted = [index for index, each in enumerate(tokens) if each[3]]
        rows = [llama_cpp.llama_get_logits_ith(self.context, index) for index in wanted]
        return [int(np.ctypeslib.as_array(row, shape=(VOCAB_SIZE,)).argmax()) for row in rows]

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[float], list[int]]:
        """Seconds of each decode step, and the first prompt's tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        last = []
        for sequence, prompt in enumerate(prompts):
            end = len(prompt) - 1
            last += self.run([(token, at, sequence, at == end) for at, token in enumerate(prompt)])
        times, first = [], last[:1]
        for step in range(new_tokens - 1):
            start = self.clock()
            last = self.run([(token, len(prompts[i]) + step, i, True) for i, token in enumerate(last)])
            times.append(self.clock() - start)
            first.append(last[0])
        return times, first


def decode(llama: Llama, task: Task, batch: int) -> tuple[list[float], list[int]]:
    """With the keys and values in one buffer or in many: the quicker one's steps, and the first prompt's tokens."""
    found = []
    for is_unified in (True, False)[: 1 if batch == 1 else 2]:
        llama.open(batch, task.prompt_tokens + task.new_tokens, is_unified=is_unified)
        found.append(llama.generate(task.prompts(batch), task.new_tokens))
    return min(found, key=lambda each: statistics.median(each[0]))


def main() -> None:
    """All of the task; figures on standard output."""
    task, report = read_task(), Report()
    began = time.perf_counter()
    path = convert(task.model, task.dtype)
    report.making_seconds = time.perf_counter() - began
    llama = Llama(task, path)
    llama.open(1, task.prompt_tokens + task.new_tokens, is_unified=True)
    llama.generate(task.prompts(1), 1)
    report.saw_first_token()
    for batch in task.batches:
        times, tokens = decode(llama, task, batch)
        report.decoded(batch, times)
        if batch == 1:
            report.tokens = tokens
    llama.open(1, task.prefill_tokens + 1, is_unified=True)
    llama.generate([task.long_prompt()[:512]], 1)  # a new context's memory is touched for the first time
    start = task.clock()
    llama.generate([task.long_prompt()], 1)
    report.prefill_seconds = task.clock() - start
    report.print()


if __name__ == "__main__":
    main()
