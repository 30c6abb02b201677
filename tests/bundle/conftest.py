"""The checkpoint, its bundle and the shared memory of the weights tests."""

from tests.weft.weights.conftest import bundle, checkpoint, large_pages, pages, shared_memory

__all__ = ["bundle", "checkpoint", "large_pages", "pages", "shared_memory"]
