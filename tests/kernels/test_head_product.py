"""Products of heads are those of the reference, and a row's does not depend on the other rows."""

from __future__ import annotations

import pytest
import torch

from weft_kernels.head_product import head_product, head_product_reference
from weft_kernels.native import CHOICE


def make_case(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of three heads within wider heads, and a matrix for each head."""
    generator = torch.Generator().manual_seed(7)
    x, weight = (
        torch.randn(rows, 3, inputs + 5, generator=generator),
        torch.randn(3, inputs, outputs, generator=generator),
    )
    return x.to(dtype)[..., :inputs], weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(10, 16), (16, 14), (33, 200), (1, 5)])
@pytest.mark.usefixtures("isa")
def test_head_product_equals_reference(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = make_case(40, inputs, outputs, dtype)
    alone = torch.cat([head_product(row[None], weight) for row in x])
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-7, 1e-3)
    torch.testing.assert_close(alone, head_product_reference(x, weight), rtol=rtol, atol=atol)
    for rows in range(1, 41):
        assert torch.equal(head_product(x[:rows], weight), alone[:rows])


def test_head_product_runs_without_cpp_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "torch")
    x, weight = make_case(5, 16, 14, torch.float32)
    torch.testing.assert_close(head_product(x, weight), head_product_reference(x, weight), rtol=1e-5, atol=1e-5)
