"""A config made small enough to be started often, with what matters to failures left as it is."""

from pathlib import Path

from jaxmnt.config.load import parse_config
from jaxmnt.config.schema import Checkpoint, Config, Mesh

EVERY = 4
"""Steps from checkpoint to checkpoint."""

_WIDTH, _LENGTH, _ROWS_A_SHARD = 64, 64, 4
_SILENCE_SECONDS, _HANG_SECONDS = 6.0, 10.0


def shrunk(config: Config, devices: int, steps: int, cache: Path | None = None) -> Config:
    """The same data, kinds of parallelism and settings, with a tiny model and short rows, for `steps` steps.

    Compiled programs are kept in `cache`, unless the config has a folder for them. Raises `ConfigError` for what cannot
    be made small.
    """
    mesh = _mesh(config.mesh, devices)
    sizes = mesh.sizes()
    pieces = (sizes["pipeline"] or 1) * config.pipeline.chunks
    model, data = config.model, config.data
    shards = devices // ((sizes["pipeline"] or 1) * (sizes["model"] or 1))
    small = config.model_dump()
    small["model"] |= {
        "hidden_size": _WIDTH,
        "num_layers": max(2, pieces),
        "num_heads": 4,
        "num_kv_heads": 4 if model.num_kv_heads == model.num_heads else 2,
        "head_dim": _WIDTH // 4,
        "intermediate_size": 2 * _WIDTH,
        "attention": "auto",
    }
    small["data"] |= {
        "sequence_length": min(_LENGTH, data.sequence_length),
        "global_batch_size": _ROWS_A_SHARD * shards,
        "log_digest": True,
        "stage_dir": None,
        "skip": [],
        "weight_changes": [],
        "verify": False,
    }
    small["train"] |= {"steps": steps, "eval_every": 0, "stop_after": None, "max_bad_steps": 1}
    if config.train.microbatch_size is not None or pieces > 1:
        small["train"]["microbatch_size"] = 1
    small["optimizer"]["warmup_steps"] = min(config.optimizer.warmup_steps, steps // 4)
    small["checkpoint"] = Checkpoint(every_steps=EVERY, keep=3, read=config.checkpoint.read).model_dump()
    small["mesh"] = mesh.model_dump()
    small["pipeline"]["layers"] = None
    small["run"] |= {"init_from": None, "fork_from": None, "max_minutes": None}
    small["run"]["compile_cache"] = config.run.compile_cache or (None if cache is None else str(cache))
    small["watchdog"] |= {"step_seconds": _HANG_SECONDS, "factor": 10.0}
    small["cluster"] |= {"silence_timeout_seconds": _SILENCE_SECONDS}
    return parse_config(small, "the config made small")


def _mesh(mesh: Mesh, devices: int) -> Mesh:
    """The axes that the config splits over, each by two as long as there are devices; data takes the rest."""
    left, sizes = devices, dict.fromkeys(mesh.sizes(), 1)
    for axis, size in mesh.sizes().items():
        if axis != "data" and size not in (None, 1) and left % 2 == 0:
            sizes[axis], left = 2, left // 2
    return mesh.model_copy(update=sizes | {"data": left, "allow_split_hosts": True})
