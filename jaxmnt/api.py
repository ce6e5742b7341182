"""The stable Python API: `jaxmnt.load_config`, `jaxmnt.train`, `jaxmnt.load_run`, `jaxmnt.load_rows`.

Everything else may change from one version to the next. docs/api.ipynb demonstrates all four.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax import Array

from jaxmnt.checkpoint.refs import find, start_folders, tokenizer_of
from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Config
from jaxmnt.data.batches import RowSource, TrainingData
from jaxmnt.data.order import BranchPoint
from jaxmnt.data.run_tokenizer import RunTokenizer
from jaxmnt.data.sources import fit_to_data, open_sources
from jaxmnt.data.text_pieces import decode_after
from jaxmnt.errors import ConfigError
from jaxmnt.run.branch import branch_points
from jaxmnt.run.rundir import branches_of, read_config
from jaxmnt.trained_model import AdapterOptions, restore_model
from jaxmnt.training.inference import row_logits
from jaxmnt.training.spec import StepSpec


class Run:
    """A checkpoint of a run, with its parameters on this process's devices. Made by `load_run`."""

    config: Config
    """Config of the run when the checkpoint was written."""
    step: int
    """Number of updates before the checkpoint."""
    params: dict[str, Any]
    """Parameters as nested dicts of JAX arrays, with stacked layers in order, and without padding."""

    def __init__(
        self,
        config: Config,
        step: int,
        state: dict[str, Any],
        spec: StepSpec,
        tokenizer: RunTokenizer,
        folder: Path,
        branches: Sequence[BranchPoint],
    ):
        self.config, self.step, self.params = config, step, state["params"]
        self._branches = branches
        self._buffers = state.get("buffers", {})
        self._spec, self._tokenizer, self._folder = spec, tokenizer, folder
        self._logits = jax.jit(functools.partial(row_logits, spec))

    def __repr__(self) -> str:
        return f"<jaxmnt.Run {self.config.run.dir} at step {self.step}>"

    def __call__(self, tokens: Any) -> Array:
        """Returns the logits for the token that follows each of `tokens`: float32 [B, L, ids] for int [B, L].

        Each row is a separate document. Raises `ValueError` if the tokens have another shape, if the model does not
        have one of the ids, or if the rows cannot be split evenly among the devices of the mesh that share a batch.
        """
        tokens_BL = np.asarray(tokens)
        shards = self._spec.placement.batch_shards
        if tokens_BL.ndim != 2 or tokens_BL.dtype.kind not in "iu":
            raise ValueError(f"tokens must be integers [rows, length], not {tokens_BL.dtype} {list(tokens_BL.shape)}")
        if tokens_BL.size and not 0 <= tokens_BL.min() <= tokens_BL.max() < self._spec.data_vocab_size:
            raise ValueError(f"tokens must be ids from 0 to {self._spec.data_vocab_size - 1}")
        if tokens_BL.size == 0 or tokens_BL.shape[0] % shards:
            raise ValueError(
                f"the number of rows must be a positive multiple of {shards} (the number of devices that share "
                f"them), not {tokens_BL.shape[0]}, and each row must have at least one token"
            )
        # Tokens after the last one change none of the logits before them.
        length, divisor = tokens_BL.shape[1], self._spec.placement.row_divisor
        padded_BL = np.pad(tokens_BL.astype(np.int32), ((0, 0), (0, -length % divisor)))
        sharding = self._spec.placement.sharding(("batch", "length"))
        logits_BLV = self._logits(self.params, self._buffers, jax.device_put(padded_BL, sharding))
        return logits_BLV if length == padded_BL.shape[1] else logits_BLV[:, :length]

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Returns the global batch of update `step` (counted from 1): tokens, targets, weights, segments and positions,
        each [G, L].

        The batch is read from the run's data, which must be where the config says. Raises `ConfigError` if it is not,
        or if the run does not take this step itself. The steps before a branch belong to the run that it branched off
        from.
        """
        first_step = self._branches[0].step + 1 if self._branches else 1
        if not first_step <= step <= self.config.train.steps:
            raise ConfigError(
                f"step {step} is not one of this run's; give a number from {first_step} to {self.config.train.steps}"
            )
        return self._data.batch(step - 1, np.arange(self.config.data.global_batch_size))

    @functools.cached_property
    def _data(self) -> TrainingData:
        """The run's training data. Relative paths are relative to the folder in which the run was started."""
        data = self.config.data
        resolve = lambda path: None if path is None else str(self._folder / path)
        sources = {
            name: source.model_copy(update={"path": resolve(source.path)}) for name, source in data.sources.items()
        }
        resolved = data.model_copy(update={"path": resolve(data.path), "sources": sources})
        return TrainingData(self.config, open_sources(resolved, resolve(self.config.run.dir)), self._branches)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, int32 [L]. Raises `ConfigError` if the run has no tokenizer."""
        return np.asarray(self._tokenizer.open().encode_batch([text])[0], np.int32)

    def decode(self, ids: Any, context: Any = ()) -> str:
        """Returns the text of `ids`. If the ids of a `context` are given, returns the text that `ids` add to it, which
        may begin with a space."""
        return decode_after(self._tokenizer.open(), np.asarray(context), np.asarray(ids))


def load_rows(config: Config | str | Path, *, process: int = 0, processes: int = 1) -> grain.MapDataset:
    """Returns the rows that a run of this config trains on, in its order, for a Grain pipeline of your own.

    `config` may also be a run directory, whose `config.yaml` is read. The rows are shuffled, packed and mixed as in the
    run. Element *i* of `process` is a dict of arrays [L], and the processes take equal, consecutive shares of each
    global batch. The dataset covers the whole run; that of a branch begins with the branch's own first step.
    Raises `ConfigError` if the data cannot be read, or if the batch cannot be split evenly among the processes.
    """
    if not isinstance(config, Config):
        config = read_config(Path(config))
    batch = config.data.global_batch_size
    if processes < 1 or batch % processes or not 0 <= process < processes:
        raise ConfigError(
            f"load_rows: process {process} of {processes} cannot take an equal share of {batch} rows; give a number of "
            "processes that divides data.global_batch_size, and a process below it"
        )
    data = open_sources(config.data, config.run.dir)
    share = batch // processes
    rows = range(process * share, (process + 1) * share)
    training = TrainingData(fit_to_data(config, data), data, branches_of(config))
    return grain.MapDataset.source(RowSource(training, rows, config.train.steps))


def load_run(
    directory: str | Path,
    step: int | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    devices: Sequence[jax.Device] | None = None,
    base: str | None = None,
    adapters: bool = True,
) -> Run:
    """Loads the newest valid checkpoint of a run, or the one of `step`, from a run directory or a gs:// address.

    `mesh` maps axes to their sizes, such as {"fsdp": 4, "model": 2}, and uses as many of `devices` (default: those of
    this process) as it needs. Without a mesh, the model is on one device. There is no pipeline, even if the run was
    trained with one. The arrays are checked against their digests. For a run with adapters, `base` is where its base is
    now (default: where the run has read it), and with `adapters=False` the model is the base alone. Raises
    `ConfigError` if the run or step does not exist or the mesh is not possible, and `DamagedError` for a checkpoint
    that differs from what was saved.
    """
    text = str(directory) if step is None else f"{directory}@{step}"
    checkpoint = find(text, "load_run")
    config = checkpoint.config
    tokenizer = tokenizer_of(text, checkpoint)
    sizes = parse_config({"mesh": {"data": 1} | dict(mesh or {})}, "load_run").mesh
    available = list(devices or jax.local_devices())
    needed = int(np.prod([size for size in sizes.sizes().values() if size > 0]))
    if needed > len(available):
        raise ConfigError(f"mesh: it needs {needed} devices, but there are {len(available)}; make it smaller")
    used = available if -1 in sizes.sizes().values() else available[:needed]
    spec, state = restore_model(
        checkpoint, config, tokenizer.vocab_size, sizes, used, AdapterOptions(base, adapters, "base")
    )
    folder = next(iter(start_folders(text, checkpoint, config)), Path.cwd())
    branches = branch_points(checkpoint.manifest.lineage)
    return Run(config, checkpoint.step, state, spec, tokenizer, folder, branches)
