"""Norms of flat values."""

import torch

TILE = 2**16  # elements; torch would first copy a whole 16-bit vector to fp32, beyond the size of the caches


def norm_of(values: torch.Tensor) -> torch.Tensor:
    """The 2-norm of a vector [n] as a scalar, computed in fp32 at least."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    valueless = values.untyped_storage().device.type == "meta"  # in a rehearsal
    if values.device.type != "cpu" or values.dtype == dtype or valueless:
        whole: torch.Tensor = torch.linalg.vector_norm(values, dtype=dtype)
        return whole
    parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in values.split(TILE)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return norm


def wide_norm(values: torch.Tensor, kind: float = 2.0) -> float:
    """The p-norm of values, real or complex, for p = `kind`, computed in fp64."""
    dtype = torch.promote_types(values.dtype, torch.float64)
    return float(torch.linalg.vector_norm(values, kind, dtype=dtype))
