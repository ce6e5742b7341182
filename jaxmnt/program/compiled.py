"""The steps compiled ahead of step 0, the state that they work on, and the memory that they need."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmnt.config.schema import Config, Mesh
from jaxmnt.errors import ConfigError
from jaxmnt.model.decoder import define
from jaxmnt.placement.mesh import build_mesh
from jaxmnt.placement.rules import Placement, check_divides
from jaxmnt.program.optimizer import build_optimizer
from jaxmnt.program.step import (
    BATCH_LOGICAL_AXES,
    FLAG_AXES,
    Setting,
    State,
    eval_step,
    resolve_precision,
    train_step,
)

BATCH_DTYPES = {
    "tokens": jnp.int32,
    "targets": jnp.int32,
    "weights": jnp.float32,
    "segments": jnp.int32,
    "positions": jnp.int32,
}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    params: int
    optimizer: int
    temporary: int
    total: int
    limit: int | None


@dataclass(frozen=True)
class Program:
    """What a run executes. `step(state, batch)` donates the state; all are compiled."""

    setting: Setting
    step: Any
    evaluate: Any
    abstract_state: State
    memory: Memory
    compile_seconds: float

    @property
    def placement(self) -> Placement:
        return self.setting.placement

    def init(self) -> State:
        """The state before the first step, created in place on its shards."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        return jax.jit(lambda: _initial_state(self.setting), out_shardings=shardings)()

    @property
    def batch_sharding(self) -> NamedSharding:
        return self.placement.sharding(("batch", "length"))

    @property
    def flag_sharding(self) -> NamedSharding:
        return self.placement.sharding(FLAG_AXES)

    @property
    def eval_rows(self) -> int:
        """Rows of a global evaluation batch: what one pass holds."""
        return self.setting.rows_a_pass * self.placement.batch_shards


def compile_program(config: Config, data_vocab: int, devices: Sequence[jax.Device] | None = None) -> Program:
    """Plans the placement, checks every size against it, and compiles both steps. Reads no data.

    Raises `ConfigError` for sizes that do not fit the mesh, the data or the device's memory.
    """
    setting = _plan(config, data_vocab, devices)
    state = _abstract_state(setting)
    started = time.perf_counter()
    # float32 means float32: without this, GPUs would multiply in TF32.
    precision = "highest" if setting.dtype == jnp.float32 else "default"
    with jax.default_matmul_precision(precision):
        step = _compile_step(setting, state)
        evaluate = _compile_eval(setting, state)
    seconds = time.perf_counter() - started
    memory = _measure(state, step, setting.placement)
    if memory.limit is not None and memory.total > memory.limit:
        raise ConfigError(
            f"memory: a step needs {memory.total / 2**30:.2f} GiB on a device that has "
            f"{memory.limit / 2**30:.2f} GiB; lower train.microbatch_size, raise mesh.fsdp, "
            "or set train.remat: full"
        )
    return Program(setting, step, evaluate, state, memory, seconds)


def single_device_setting(config: Config, data_vocab: int) -> tuple[Setting, Any]:
    """What running a trained model on one device takes: the setting and the abstract parameters."""
    one = config.model_copy(
        update={"mesh": Mesh(data=1), "train": config.train.model_copy(update={"microbatch_size": None})}
    )
    setting = _plan(one, data_vocab, jax.local_devices()[:1])
    return setting, _abstract_state(setting)["params"]


def _plan(config: Config, data_vocab: int, devices: Sequence[jax.Device] | None) -> Setting:
    placement = Placement(build_mesh(config.mesh, devices))
    vocab = config.model.vocab_size
    assert vocab is not None, "resolve the vocabulary first"
    check_divides(config, vocab, placement)
    definition = define(config.model, vocab)
    optimizer, schedule = build_optimizer(config, definition.axes)
    dtype, kernel = resolve_precision(config, placement.mesh.devices.flat[0])
    return Setting(config, definition, placement, optimizer, schedule, dtype, kernel, data_vocab)


def _initial_state(setting: Setting) -> State:
    params = setting.definition.init(jax.random.key(setting.config.seed))
    return {
        "params": params,
        "optimizer": setting.optimizer.init(params),
        "counters": {"step": jnp.int32(0)},
    }


def _abstract_state(setting: Setting) -> State:
    """Shapes, dtypes and shardings of the state; optimizer state is sharded like its parameter."""
    abstract = jax.eval_shape(lambda: _initial_state(setting))
    placement = setting.placement
    shardings = placement.shardings(setting.definition.axes)
    everywhere = NamedSharding(placement.mesh, P())
    optimizer = optax.tree_map_params(
        setting.optimizer,
        lambda _, sharding: sharding,
        abstract["optimizer"],
        shardings,
        transform_non_params=lambda _: everywhere,
    )
    tree = {"params": shardings, "optimizer": optimizer, "counters": {"step": everywhere}}
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, tree
    )


def _abstract_batch(setting: Setting, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (rows, setting.config.data.sequence_length)
    return {
        name: jax.ShapeDtypeStruct(shape, BATCH_DTYPES[name], sharding=setting.placement.sharding(axes))
        for name, axes in BATCH_LOGICAL_AXES.items()
    }


def _compile_step(setting: Setting, state: State) -> Any:
    batch = _abstract_batch(setting, setting.config.data.global_batch_size)
    flags = (setting.placement.mesh.size,)
    batch["stop"] = jax.ShapeDtypeStruct(flags, jnp.int32, sharding=setting.placement.sharding(FLAG_AXES))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(
        lambda state, batch: train_step(setting, state, batch),
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(setting.placement.mesh, P())),
    )
    return step.lower(state, batch).compile()


def _compile_eval(setting: Setting, state: State) -> Any:
    batch = _abstract_batch(setting, setting.rows_a_pass * setting.placement.batch_shards)
    evaluate = jax.jit(
        lambda params, batch: eval_step(setting, params, batch),
        out_shardings=NamedSharding(setting.placement.mesh, P()),
    )
    return evaluate.lower(state["params"], batch).compile()


def _measure(state: State, step: Any, placement: Placement) -> Memory:
    analysis = step.memory_analysis()
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return Memory(
        params=_bytes_a_device(state["params"]),
        optimizer=_bytes_a_device(state["optimizer"]),
        temporary=temporary,
        total=arguments + temporary + outputs,
        limit=_device_limit(placement),
    )


def _bytes_a_device(tree: Any) -> int:
    return sum(leaf.dtype.itemsize * _product(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _device_limit(placement: Placement) -> int | None:
    """What a device may use: the GPU allocator's limit, or on CPU this host's memory shared by its devices."""
    local = [device for device in placement.mesh.devices.flat if device.process_index == jax.process_index()]
    device = local[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(local)
    statistics = device.memory_stats() or {}
    return statistics.get("bytes_limit")
