"""A device's part of a step: its stage, its weights and its rows, and what a tick of the schedule does with them.

Shapes: A microbatches, B rows of a microbatch, L length, S a device's piece of the length, D model.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxmnt.models.contract import Params
from jaxmnt.parallel import collectives, stages
from jaxmnt.training.embed_head import EmbedAndHead
from jaxmnt.training.noise import SmallBatches, small_batches
from jaxmnt.training.pipeline_schedule import PipelineSchedule, Table, schedule_table
from jaxmnt.training.spec import Batch, StepSpec
from jaxmnt.training.stage import Layers, Pass, PrefetchedLayers, Rows, microbatch_rows
from jaxmnt.training.weights import WEIGHTS_BY_ZERO, Weights

FORWARD, BACKWARD, LOSS, EMBED, EMBED_BACKWARD = "stage_forward", "stage_backward", "loss", "enter", "leave"
"""The scopes in the compiled program for phases that a condition may skip. `LOSS`, `EMBED` and `EMBED_BACKWARD` are
also the names of the table's arrays for the ends of the pipeline."""
STEADY = "steady"
"""The scope of ticks in which every stage has a forward and a backward."""

RowKeys = Callable[[Array], Array | None]
"""A function that returns the random keys of a microbatch's rows, or None without dropout."""

TickPlan = dict[str, Array]
"""The entry for one tick in each of the table's arrays."""

Tick = Callable[[Any, TickPlan], tuple[Any, None]]
"""A function that runs one tick. It takes the carry and the plan of the tick, and returns (new carry, None)."""


@dataclass(frozen=True)
class Step:
    """This device's part of a step: its stage, its weights and its rows."""

    spec: StepSpec
    schedule: PipelineSchedule
    table: Table
    stage: Any
    """The index of this device's stage."""
    weights: Weights
    layers: dict[str, Layers]
    """The layers of this device's stage, by group."""
    ends: EmbedAndHead
    """The ends of the model: the embedding, and the final norm, head and loss."""
    fields: Batch
    """The batch's fields, each [A, B, L]."""
    row_keys: RowKeys
    targets_per_token: Array | None
    """See `LayerContext.targets_per_token`; None if the family does not use it."""
    small_batches: SmallBatches | None
    """The small batches whose gradients are squared, if requested."""

    @property
    def is_single_stage(self) -> bool:
        """True if there is no pipeline."""
        return self.schedule.stages == 1

    def run(self, tick: Tick, start: Any, last_tick: Tick | None = None) -> Any:
        """Runs `tick` from `start` over all ticks of the table, and returns the final carry. `last_tick`, if given,
        replaces `tick` in the last tick."""
        arrays = self.table.arrays
        ticks = len(arrays["forward"])
        if ticks > 1:
            looped_ticks = ticks if last_tick is None else ticks - 1
            looped_plans = jax.tree.map(lambda array: jnp.asarray(array[:looped_ticks]), arrays)
            start = jax.lax.scan(tick, start, looped_plans)[0]
            if last_tick is None:
                return start
        last_plan = jax.tree.map(lambda array: jnp.asarray(array[-1]), arrays)
        return (last_tick or tick)(start, last_plan)[0]

    def in_ticks(self, ticks: Sequence[int]) -> "Step":
        """Returns the step with these ticks alone. In ticks in which every stage has work in a phase, its functions
        need no condition for that phase."""
        arrays = {name: array[list(ticks)] for name, array in self.table.arrays.items()}
        return replace(self, table=self.table._replace(arrays=arrays))

    def rows(self, microbatch: Array) -> Batch:
        """Returns a microbatch's fields, [B, L] each. For -1, which stands for no microbatch, it returns rows that are
        not used."""
        pick = lambda field: jax.lax.dynamic_index_in_dim(field, jnp.maximum(microbatch, 0), keepdims=False)
        return jax.tree.map(pick, self.fields)

    def layer_rows(self, microbatch: Array) -> Rows:
        """Returns the fields of a microbatch that all layers use."""
        microbatch = jnp.maximum(microbatch, 0)
        return microbatch_rows(self.spec, self.rows(microbatch), self.row_keys(microbatch), self.targets_per_token)

    def zero_activations(self) -> Array:
        """Returns zeros [B, S, D], shaped like the activations that stages send to each other."""
        spec = self.spec
        length = spec.placement.local_length(spec.config.data.sequence_length)
        return jnp.zeros((spec.microbatch_rows, length, spec.config.model.hidden_size), spec.dtype)

    def pass_at(self, plan: TickPlan, phase: str, scope: str) -> Pass:
        """Returns the pass of a microbatch through a chunk of this stage in a phase of a tick."""
        microbatch, chunk, slot, is_reversed = plan[phase][self.stage]
        run_if_active = functools.partial(_run_if_active, self.table.arrays[phase][..., 0], microbatch, scope)
        order = is_reversed if self.schedule.steady_ticks else None
        return Pass(chunk, slot, self.layer_rows(microbatch), run_if_active, order)

    def run_if_at_pipeline_end(
        self, plan: TickPlan, end: str, compute: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        """Returns `compute()` in a tick in which a microbatch is at this end of the pipeline (`EMBED`, `LOSS` or
        `EMBED_BACKWARD`), else `skip()`."""
        return _run_if_active(self.table.arrays[end], plan[end], end, None, compute, skip)

    def chunk_input(self, plan: TickPlan, chunk: Array, arriving_BSD: Array) -> Array:
        """Returns a chunk's input. This is the embedding for the first stage's first chunk, and `arriving_BSD`, the
        output of the previous piece of the model, for all other chunks."""
        embed = lambda: self.ends.embed(self.rows(plan[EMBED]))
        x_BSD = self.run_if_at_pipeline_end(plan, EMBED, embed, lambda: arriving_BSD)
        return x_BSD if self.is_single_stage else jnp.where((self.stage == 0) & (chunk == 0), x_BSD, arriving_BSD)

    def shift_between_stages(self, x_BSD: Array, *, forward: bool) -> Array:
        """Sends x to the next stage if `forward`, else to the previous one, and returns the activations or gradients
        that arrive from the other neighbour."""
        if self.is_single_stage:
            return x_BSD
        circular = self.schedule.chunks > 1
        return stages.shift_stage(x_BSD, self.spec.placement, forward=forward, circular=circular)


def prepare_step(
    spec: StepSpec,
    params: Params,
    buffers: Params,
    batch: Batch,
    schedule: PipelineSchedule,
    row_keys: RowKeys = lambda _: None,
) -> Step:
    """Returns this device's part of a step. Weights that are gathered once per step are gathered here."""
    weights = WEIGHTS_BY_ZERO[spec.zero](spec, params)
    stage = 0 if schedule.stages == 1 else stages.stage_index()
    split_into_microbatches = lambda field: field.reshape(-1, spec.microbatch_rows, *field.shape[1:])
    fields = jax.tree.map(split_into_microbatches, batch)
    layers = {}
    layers_class = PrefetchedLayers if spec.prefetch else Layers
    for group in spec.definition.groups:
        order = np.array([[-1 if unit is None else unit for unit in units] for units in spec.slots[group.name]])
        stage_order = jnp.asarray(order)[stage]
        depth = order.shape[1] // schedule.chunks
        all_filled = bool((order >= 0).all())
        layers[group.name] = layers_class(spec, group, weights, buffers, stage_order, depth, all_filled=all_filled)
    step = Step(
        spec, schedule, schedule_table(schedule), stage, weights, layers, EmbedAndHead(spec, weights), fields, row_keys,
        _targets_per_token(spec, batch), small_batches(spec),
    )  # fmt: skip
    if spec.float8 and spec.config.train.float8_gather and spec.zero == 3:
        for group_layers in layers.values():
            group_layers.enable_float8_gather(step.zero_activations(), step.layer_rows(jnp.int32(0)))
    return step


def _targets_per_token(spec: StepSpec, batch: Batch) -> Array | None:
    """Returns `LayerContext.targets_per_token` of a step, or None if the family does not use it."""
    if not spec.definition.family.uses_targets_per_token:
        return None
    local_sums = (jnp.sum(batch["weights"]), jnp.sum(batch["segments"] > 0, dtype=jnp.float32))
    weight, tokens = collectives.sum_over_tokens(local_sums, spec.placement)
    return weight / jnp.maximum(tokens, 1)


def _run_if_active(
    microbatch_of_ticks: np.ndarray,
    microbatch: Array,
    scope: str,
    extra_condition: Array | None,
    compute: Callable[[], Any],
    skip: Callable[[], Any],
) -> Any:
    """Returns `compute()` in `scope` if this tick has a microbatch and `extra_condition` is true or None, else
    `skip()`. No condition is compiled if every tick in `microbatch_of_ticks` has a microbatch and `extra_condition` is
    None."""

    def compute_in_scope() -> Any:
        with jax.named_scope(scope):
            return compute()

    conditions = [] if (microbatch_of_ticks >= 0).all() else [microbatch >= 0]
    conditions += [] if extra_condition is None else [extra_condition]
    if not conditions:
        return compute_in_scope()
    return jax.lax.cond(functools.reduce(jnp.logical_and, conditions), compute_in_scope, skip)
