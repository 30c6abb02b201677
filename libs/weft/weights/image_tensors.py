"""The worker's side of an image: tensors that are views of shared memory, without a copy."""

from __future__ import annotations

import mmap
import os

import torch

from weft.errors import NotFound
from weft.weights.image import image_path, mark_mapped, open_image_file
from weft.weights.safetensors import header_of
from weft.weights.storage import MemoryBlob

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def open_image(shm_name: str, size_bytes: int) -> dict[str, torch.Tensor]:
    """Return every tensor of the image by name, in the dtype of the checkpoint.

    The mapping lives as long as any tensor and marks the image as used. It is private: a write would copy the page for
    this process only. Raises NotFound if the image is gone; the caller must load again.
    """
    path = image_path(shm_name)
    try:
        fd = open_image_file(path)
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    try:
        if os.fstat(fd).st_size != size_bytes:
            raise NotFound(f"{path} has not {size_bytes} bytes: it is not the image that was announced")
        mark_mapped(fd)
        memory = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    tensors = {}
    for entry in header_of(str(path), MemoryBlob(str(path), memory)).tensors:  # the name may already be unlinked
        dtype = TORCH_DTYPES[entry.dtype]
        count = entry.size_bytes // dtype.itemsize
        tensors[entry.name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.offset).view(entry.shape)
    return tensors
