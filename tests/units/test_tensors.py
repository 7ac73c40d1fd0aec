"""Norms in tiles are those of the whole, as torch computes them in double precision."""

import pytest
import torch

from zeroshard.units import norm_of
from zeroshard.units.tensors import TILE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 1000, TILE, 2 * TILE + 77])
def test_the_norm_of_any_dtype(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = norm_of(values)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), torch.linalg.vector_norm(values.double()), rtol=1e-5, atol=0)


def test_what_is_not_finite_shows() -> None:
    for bad in (torch.inf, torch.nan):
        values = torch.ones(3 * TILE, dtype=torch.bfloat16)
        values[-1] = bad
        assert not norm_of(values).isfinite()
