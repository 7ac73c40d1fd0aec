"""The 2-norm of flat values, the same wherever they are when it is taken."""

import torch

TILE = 2**16  # elements; torch would make an fp32 copy of all of a 16-bit vector first, far outside of the caches


def norm_of(values: torch.Tensor) -> torch.Tensor:
    """The 2-norm of a vector [n] as a scalar, computed in fp32 at least."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    valueless = values.untyped_storage().device.type == "meta"  # in a rehearsal, where each tile would only take time
    if values.device.type != "cpu" or values.dtype == dtype or valueless:
        whole: torch.Tensor = torch.linalg.vector_norm(values, dtype=dtype)
        return whole
    parts = [torch.linalg.vector_norm(part, dtype=dtype) for part in values.split(TILE)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return norm
