"""Code shared by families that alternate between layers with an attention window and layers without."""

import functools
from collections.abc import Sequence

from flax import nnx
from jax import Array

from jaxmnt.config.model import Model
from jaxmnt.models.attention import Attention
from jaxmnt.models.contract import AttentionShape, Family, LayerGroup
from jaxmnt.models.llama import Block
from jaxmnt.models.rotary import Angles, rotary_angles

LOCAL, GLOBAL = "local", "global"


def window_of_kind(config: Model, kind: str) -> int | None:
    """Returns the maximum number of tokens that a query sees in a layer of this kind; None if it has no window."""
    return config.sliding_window if kind == LOCAL else None


class AlternatingAttention(Attention):
    """Attention with a window in layers of the kind `LOCAL`."""

    def __init__(self, config: Model, output_std: float, rngs: nnx.Rngs, kind: str):
        super().__init__(config, output_std, rngs)
        self.kind, self.window = kind, window_of_kind(config, kind)


class AlternatingFamily(Family):
    """A family whose layers repeat a pattern of several layers with a window and then one without. If the number of
    layers is not a multiple of the pattern's length, the remaining ones are in a last group, `last_layers`, and are of
    the same kinds as the first layers of the pattern."""

    settings: Sequence[str] = ("sliding_window", "sliding_window_pattern")
    pattern_length: int
    """Length of the pattern if `model.sliding_window_pattern` is not set."""
    block: type[Block]
    attention: type[AlternatingAttention]

    def groups(self) -> list[LayerGroup]:
        layers = self.config.num_layers
        length = self.config.sliding_window_pattern or self.pattern_length
        pattern = (LOCAL,) * (length - 1) + (GLOBAL,)
        groups = [
            LayerGroup("layers", pattern, layers // length),
            LayerGroup("last_layers", pattern[: layers % length], 1),
        ]
        return [group for group in groups if group.num_layers]

    def layer(self, kind: str, rngs: nnx.Rngs) -> nnx.Module:
        return self.block(self.config, functools.partial(self.attention, kind=kind), rngs)

    def attention_shape(self, kind: str) -> AttentionShape:
        return super().attention_shape(kind)._replace(window=window_of_kind(self.config, kind))


def rotary_tables_by_kind(config: Model, positions_BL: Array) -> dict[str, Angles]:
    """Returns the rotary tables for both kinds of layers. Those with a window have their own base and no scaling."""
    assert config.head_dim
    return {
        LOCAL: rotary_angles(positions_BL, config.head_dim, config.local_rope_theta or config.rope_theta),
        GLOBAL: rotary_angles(positions_BL, config.head_dim, config.rope_theta, config.rope_scaling),
    }
