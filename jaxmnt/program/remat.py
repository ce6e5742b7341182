"""What the backward pass of a layer keeps, and what it computes again: remat policies by name.

Weights are no matter of these policies: `stage.py` never keeps them.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxmnt.placement.collectives import SCATTERED

Remat = Literal["none", "attention", "dots", "names", "full"]

NAMES = ("query", "key", "value", "attention", "attention_output", "mlp_gate", "mlp_up", "mlp_output", "whole_sequence")
"""What `train.remat_save` may keep. All of these are bfloat16 or float32 activations of a layer:
query, key, value, attention [B, L, heads, head_dim], mlp_gate and mlp_up [B, L, mlp], split over `model`; the outputs
[B, L / model, D]; whole_sequence, the gathered inputs of attention and MLP [B, L, D]."""


def rematerialise(layer: Callable[..., Any], remat: Remat, save: list[str], *, unrolled: bool) -> Callable[..., Any]:
    """Applies the policy of this name to a layer. For `attention` the layer itself does it."""
    policies = jax.checkpoint_policies
    if remat in ("none", "attention"):
        return layer
    policy = {
        "dots": policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SCATTERED)
        ),
        "names": policies.save_only_these_names(*save),
        "full": policies.nothing_saveable,
    }[remat]
    # Inside a scan XLA cannot merge the recomputation with the first computation; unrolled, it could.
    return jax.checkpoint(layer, policy=policy, prevent_cse=unrolled)
