"""Multi-head latent attention: the cache holds one vector a token, from which all heads' keys and values would follow.

Decoding never makes them: the weights that would are absorbed into queries and results. Long chunks do make them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weft.model.attention import pairs_to_halves
from weft.model.kv_layout import kv_groups
from weft.model.loading import Loader
from weft.model.spec import Latent, ModelConfig
from weft.model.step import ExpandedSequence, LayerInputs
from weft_kernels.head_product import head_product
from weft_kernels.latent_attention import latent_attention
from weft_kernels.latent_kv import latent_kv
from weft_kernels.linear import linear
from weft_kernels.packed import plain
from weft_kernels.paged_attention import PagedBatch, paged_attention
from weft_kernels.rms_norm import rms_norm

# transformers and the published code build these norms without the config's eps
LATENT_NORM_EPS = 1e-6


class LatentAttention:
    """Cached: normed latent (kv_rank) and rotated key part (rope_dim), in this order.

    `to_latent` [heads, nope, kv_rank] takes queries to the latent, or, transposed, makes keys of it; `to_value`
    [heads, kv_rank, value] takes results from it, or makes values of it.
    """

    def __init__(
        self, config: ModelConfig, index: int, root: str, loader: Loader, place: tuple[int, int] | None = None
    ) -> None:
        """`place`: group and layer of its KV in the pool, if they are not those of the model's layer `index`."""
        assert config.latent is not None
        self.config = config
        self.latent: Latent = config.latent
        self.group, self.index = place or (kv_groups(config).group_of[index], index)
        latent, q_name = self.latent, root + ("q_b_proj" if config.latent.q_rank else "q_proj")
        self.q_down = loader.linear(root + "q_a_proj") if latent.q_rank else None
        self.q_norm = loader.norm(root + "q_a_layernorm") if latent.q_rank else None
        self.q_up = loader.linear(q_name, order=self._order(config.num_heads, latent.nope_dim + latent.rope_dim))
        kv_order = self._order(1, latent.kv_rank + latent.rope_dim)
        self.kv_down = loader.linear(root + "kv_a_proj_with_mqa", order=kv_order)
        self.kv_norm = loader.norm(root + "kv_a_layernorm")
        kv_up = plain(loader.stored_weight(root + "kv_b_proj"), loader.dtype).to(loader.dtype)
        kv_up = kv_up.view(config.num_heads, -1, latent.kv_rank)
        self.to_latent = kv_up[:, : latent.nope_dim].contiguous()
        self.to_value = kv_up[:, latent.nope_dim :].transpose(1, 2).contiguous()
        self.output = loader.linear(root + "o_proj")

    def forward(self, x: Tensor, step: LayerInputs) -> Tensor:
        """Return this rank's part of the sum [T, hidden]. Writes the rows' own vectors into the pool first."""
        down, q = linear(x, self.kv_down), self._queries(x)
        if step.temperature is not None:
            q = (q * step.temperature).to(q.dtype)
        plain, rotated = torch.split(q, [self.latent.nope_dim, self.latent.rope_dim], dim=-1)
        cache, slots = step.batches[self.group].pool.layers[self.index], step.slots[self.group]
        rotated = latent_kv(down, rotated, self.kv_norm, LATENT_NORM_EPS, step.angles[0], cache, slots)
        return linear(self._attend(plain, rotated, step).flatten(1), self.output)

    def _queries(self, x: Tensor) -> Tensor:
        """Return queries [T, heads, nope_dim + rope_dim] before rotation."""
        if self.q_down is not None and self.q_norm is not None:
            x = rms_norm(linear(x, self.q_down), self.q_norm, LATENT_NORM_EPS)
        return linear(x, self.q_up).view(len(x), self.config.num_heads, -1)

    def _attend(self, plain: Tensor, rotated: Tensor, step: LayerInputs) -> Tensor:
        """Return the attended values [T, heads, value_dim]."""
        assert step.latent is not None
        if step.latent.absorbed is not None and not step.latent.expanded:
            return self._absorbed(plain, rotated, step.latent.absorbed[1])
        values = plain.new_empty(*plain.shape[:2], self.latent.value_dim)
        if step.latent.absorbed is not None:
            rows, batch = step.latent.absorbed
            values[rows] = self._absorbed(plain[rows], rotated[rows], batch)
        for expansion in step.latent.expanded:
            q = torch.cat((plain[expansion.rows], rotated[expansion.rows]), dim=-1)
            values[expansion.rows] = self._expanded(q, step.batches[self.group].pool.layers[self.index].keys, expansion)
        return values

    def _absorbed(self, plain: Tensor, rotated: Tensor, batch: PagedBatch) -> Tensor:
        """Attend in latent space: project the queries to it and the results back."""
        latent = self.latent
        q = torch.cat((head_product(plain, self.to_latent), rotated), dim=-1)
        attended = latent_attention(q, self.index, batch, latent.kv_rank, latent.scale)
        return head_product(attended, self.to_value)

    def _expanded(self, q: Tensor, cached: Tensor, expansion: ExpandedSequence) -> Tensor:
        """Attend with keys and values expanded from the latent vectors of a whole context, some heads at a time."""
        latent, batch = self.latent, expansion.batch
        keys, values = batch.pool.layers[0].keys, batch.pool.layers[0].values
        num_blocks, num_heads, block_tokens, dim = keys.shape
        vectors = cached[expansion.blocks, 0]
        keys[..., latent.nope_dim : latent.nope_dim + latent.rope_dim] = vectors[:, None, :, latent.kv_rank :]
        keys[..., latent.nope_dim + latent.rope_dim :] = 0  # another sequence may have had values there
        compressed = vectors[..., : latent.kv_rank].flatten(0, 1)
        # the attention's own factor is that of the workspace's width
        q = functional.pad(q * (latent.scale * dim**0.5), (0, dim - q.shape[-1]))
        out = []
        for first in range(0, self.config.num_heads, num_heads):
            some = slice(first, first + num_heads)
            made = torch.matmul(compressed, self.to_latent[some].transpose(1, 2))
            keys[..., : latent.nope_dim] = made.view(num_heads, num_blocks, block_tokens, -1).transpose(0, 1)
            made = torch.matmul(compressed, self.to_value[some])
            values[..., : latent.value_dim] = made.view(num_heads, num_blocks, block_tokens, -1).transpose(0, 1)
            out.append(paged_attention(q[:, some].contiguous(), 0, batch)[..., : latent.value_dim])
        return torch.cat(out, dim=1)

    def _order(self, num_heads: int, head_dim: int) -> Tensor | None:
        rope_dim = self.latent.rope_dim
        return pairs_to_halves(num_heads * head_dim, head_dim, rope_dim) if self.config.is_interleaved else None
