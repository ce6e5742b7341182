"""The training step and the evaluation step, as pure functions of (state, batch).

Shapes: R rows of a batch shard, A accumulation passes, M rows of a pass (R = A · M), L length.

    state = {"params": …, "optimizer": …, "counters": {"step": int32}}
    batch = {"tokens", "targets", "weights", "segments", "positions": [global rows, L], "stop": [devices]}
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmnt.config.schema import Config
from jaxmnt.model.attention import Kernel, choose_kernel, device_capability
from jaxmnt.model.decoder import Definition, Params, hidden_states
from jaxmnt.placement import collectives
from jaxmnt.placement.rules import Placement, accumulation_passes, is_axes
from jaxmnt.program.loss import LossShape, LossSums, chunk_count, cross_entropy_sums

State = dict[str, Any]
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]

BATCH_LOGICAL_AXES = {
    "tokens": ("batch", "length"),
    "targets": ("batch", "length"),
    "weights": ("batch", "length"),
    "segments": ("batch", "length"),
    "positions": ("batch", "length"),
}
FLAG_AXES = ("devices",)


@dataclass(frozen=True)
class Setting:
    """Everything static that the steps are built from."""

    config: Config
    definition: Definition
    placement: Placement
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    dtype: jnp.dtype
    kernel: Kernel
    real_vocab: int

    @property
    def passes(self) -> int:
        return accumulation_passes(self.config, self.placement)

    @property
    def rows_a_pass(self) -> int:
        """Rows of one pass on one batch shard."""
        return self.config.data.global_batch_size // self.placement.batch_shards // self.passes


def resolve_precision(config: Config, device: jax.Device) -> tuple[jnp.dtype, Kernel]:
    """The compute dtype and attention kernel for a device."""
    precision = config.train.precision
    if precision == "auto":
        precision = "float32" if device.platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(precision)
    head_dim = config.model.head_dim
    assert head_dim
    kernel = choose_kernel(config.model.attention, device.platform, dtype, head_dim, device_capability(device))
    return dtype, kernel


def train_step(setting: Setting, state: State, batch: Batch) -> tuple[State, Metrics]:
    """One optimizer update from one global batch. To be jitted with the state donated.

    The loss is the mean over all real targets of the global batch, whatever the mesh and the number of passes:
    sums travel to the end and are divided once.
    """
    step = state["counters"]["step"]
    rows = {name: batch[name] for name in BATCH_LOGICAL_AXES}
    sums, tokens, weight, gradients = _sharded(setting, _local_gradients, with_gradients=True)(
        state["params"], rows, step
    )
    scale = 1 / jnp.maximum(weight, 1e-9)
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    norm = optax.tree.norm(gradients)
    clip = setting.config.optimizer.clip_norm
    if clip is not None:
        factor = jnp.minimum(1, clip / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * factor, gradients)
    updates, optimizer = setting.optimizer.update(gradients, state["optimizer"], state["params"])
    new_state = {
        "params": optax.apply_updates(state["params"], updates),
        "optimizer": optimizer,
        "counters": {"step": step + 1},
    }
    metrics = {
        "loss": sums.cross_entropy * scale,
        "grad_norm": norm,
        "learning_rate": jnp.asarray(setting.schedule(step), jnp.float32),
        "tokens": tokens,
        "stop": jnp.sum(batch["stop"]),  # over all devices, so that no process misses another's wish
    }
    return new_state, metrics


def eval_step(setting: Setting, params: Params, batch: Batch) -> Metrics:
    """Sums of cross-entropy and of real targets over one global evaluation batch."""
    sums, tokens = _sharded(setting, _local_evaluation, with_gradients=False)(params, batch)
    return {"loss_sum": sums.cross_entropy, "tokens": tokens}


def _sharded(setting: Setting, function: Callable[..., Any], *, with_gradients: bool) -> Callable[..., Any]:
    """`function(setting, …)` run on each device's shards, manual over all but the partitioner's axes."""
    placement, axes = setting.placement, setting.definition.axes
    params = jax.tree.map(placement.manual_spec, axes, is_leaf=is_axes)
    rows = {name: placement.manual_spec(names) for name, names in BATCH_LOGICAL_AXES.items()}
    whole = jax.sharding.PartitionSpec()
    if with_gradients:
        in_specs: tuple[Any, ...] = (params, rows, whole)
        out_specs: tuple[Any, ...] = (whole, whole, whole, params)
    else:
        in_specs, out_specs = (params, rows), (whole, whole)
    # No vma check: gradients are taken inside, of local values, and every reduction is written out.
    return jax.shard_map(
        lambda *arguments: function(setting, *arguments),
        mesh=placement.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=placement.manual_axes,
        check_vma=False,
    )


def _local_gradients(
    setting: Setting, params: Params, batch: Batch, step: jax.Array
) -> tuple[LossSums, jax.Array, jax.Array, Params]:
    """On one batch shard: gradients of the summed loss over all passes, then one reduction over the shards."""
    passes, rows = setting.passes, setting.rows_a_pass
    fields = {name: field.reshape(passes, rows, *field.shape[1:]) for name, field in batch.items()}

    def loss(params: Params, rows_of_pass: Batch, keys: jax.Array | None) -> tuple[jax.Array, LossSums]:
        sums = _loss_sums(setting, params, rows_of_pass, keys)
        return sums.loss, sums

    def one_pass(params: Params, rows_of_pass: Batch, index: jax.Array) -> tuple[LossSums, Params]:
        keys = _row_keys(setting, step, index)
        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params, rows_of_pass, keys)
        return sums, gradients

    def accumulate(carry: Any, scanned: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, one_pass(params, *scanned)), None

    if passes == 1:
        total = one_pass(params, {name: field[0] for name, field in fields.items()}, jnp.int32(0))
    else:
        start = (LossSums(jnp.float32(0), jnp.float32(0)), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(accumulate, start, (fields, jnp.arange(passes)))
    sums, gradients = total
    weights = batch["weights"]
    counts = (sums, jnp.sum(weights > 0, dtype=jnp.int32), jnp.sum(weights))
    sums, tokens, weight = collectives.sum_over_batch(counts)
    gradients = collectives.reduce_gradients(gradients, setting.definition.axes, setting.placement)
    return sums, tokens, weight, gradients


def _local_evaluation(setting: Setting, params: Params, batch: Batch) -> tuple[LossSums, jax.Array]:
    sums = _loss_sums(setting, params, batch, None)
    tokens = jnp.sum(batch["weights"] > 0, dtype=jnp.int32)
    return collectives.sum_over_batch((sums, tokens))


def _loss_sums(setting: Setting, params: Params, batch: Batch, row_keys: jax.Array | None) -> LossSums:
    train = setting.config.train
    x_BLD, head_DV = hidden_states(
        setting.definition,
        params,
        batch,
        row_keys,
        placement=setting.placement,
        dtype=setting.dtype,
        kernel=setting.kernel,
        remat=train.remat,
        unroll=train.layer_unroll,
        document_mask=setting.config.data.keeps_documents_apart,
    )
    vocab = setting.definition.vocab_size
    chunks = chunk_count(batch["targets"].size, vocab, setting.placement, train.loss_chunk_mib)
    shape = LossShape(chunks, setting.real_vocab, train.z_loss, setting.placement)
    return cross_entropy_sums(x_BLD, head_DV, batch["targets"], batch["weights"], shape)


def _row_keys(setting: Setting, step: jax.Array, pass_index: jax.Array) -> jax.Array | None:
    """A random key for each row of a pass from (seed, step, global row), or None without dropout."""
    if setting.config.model.dropout == 0:
        return None
    rows, passes = setting.rows_a_pass, setting.passes
    first = (collectives.batch_shard_index() * passes + pass_index) * rows
    key = jax.random.fold_in(jax.random.key(setting.config.seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(first + jnp.arange(rows))
