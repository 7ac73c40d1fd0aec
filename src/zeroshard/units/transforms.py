"""Transforms of `torch.func` (`grad`, `vjp`, `jvp`, `vmap` and their like) around a model or inside of its forward.

Inside of one, tensors are wrappers without memory of their own, which cannot be gathered into, and torch runs no hooks
of saved tensors. A model called there computes as without an engine, on weights that are whole already.
"""

import torch

from zeroshard.errors import ModelError, PlanError

IN_TRANSFORM = "A transform of torch.func cannot go through this model: "
UNHOOKED = "don't yet support saved tensor hooks"  # of torch's error
OPAQUE = ("must override the setup_context", "doesn't have storage", "Cannot access storage of")  # of others


def transforming() -> bool:
    """Whether a transform of `torch.func` runs the code that asks."""
    return bool(torch._C._are_functorch_transforms_active())


def absent_in_transform(unit: str) -> PlanError:
    """The error of a module whose parameters are on other ranks.

    Args:
        unit: of the module.
    """
    return PlanError(
        f"A transform of torch.func (grad, vjp, jvp, vmap or one made of them) calls a module with parameters of "
        f"unit '{unit}', which are sliced (zero=3) and cannot be gathered inside of it. Put `with engine.gathered():` "
        f"around the whole transform, on every rank, or use zero=2."
    )


def explain_transform(error: BaseException) -> None:
    """Add a note to torch's error, if a transform met functions of the engine that it cannot go through."""
    if UNHOOKED in str(error):
        error.add_note(
            f"{IN_TRANSFORM}grad, vjp, jacrev or hessian are called in the forward of a model, where torch runs no "
            f"hooks of saved tensors. By these sliced weights (zero=3) and activations that are recomputed, offloaded, "
            f"compressed or counted for device_memory come back in the backward. Use zero=2, without those settings."
        )
    elif transforming() and any(text in str(error) for text in OPAQUE):
        error.add_note(
            f"{IN_TRANSFORM}a function of the engine has no derivative or batched form there. Under recompute, "
            f"tensor_parallel, expert_parallel and pipeline_parallel call the transform on a copy of the model that "
            f"was built anew and given engine.state_dict(), or leave these settings out."
        )


def raise_transform(error: Exception) -> None:
    """Raise the note of `explain_transform` as an error, if there is one.

    Raises:
        ModelError: from `error`.
    """
    notes = getattr(error, "__notes__", [])
    for note in notes:
        if note.startswith(IN_TRANSFORM):
            notes.remove(note)
            raise ModelError(note) from error
