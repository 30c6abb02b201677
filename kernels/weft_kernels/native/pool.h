// Keys and values of one layer in the pages of a pool.
#pragma once

namespace weft {

// Memory layout of `NativeCache` in weft_kernels/layer_cache.py. Strides count items. With latent attention the values
// are the first `value_dim` numbers of the keys.
struct Pool {
    void *key_memory, *value_memory;
    long kv_heads, block_tokens, dim, value_dim, page_stride, head_stride, key_stride, value_stride;

    template <typename Item>
    Item* keys(long page, long head) const {
        return (Item*)key_memory + page * page_stride + head * head_stride;
    }
    template <typename Item>
    Item* values(long page, long head) const {
        return (Item*)value_memory + page * page_stride + head * head_stride;
    }
};

}  // namespace weft
