"""Reads the frozen parameters of a run with adapters, its *base*, and proves that they are those it was trained on.

Checkpoints of such a run contain what trains, and of the base only digests. Each start reads the base again, from a
folder of Hugging Face or from another run, and compares its digests with the recorded ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import Array

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Array as Entry
from jaxmnt.checkpoint.manifest import Base, DamagedError
from jaxmnt.checkpoint.names import arrays_by_name, nested_arrays, parameter_of, unflatten_like
from jaxmnt.checkpoint.refs import find, named_directory
from jaxmnt.checkpoint.restore import content_digests, raise_together, restore
from jaxmnt.config.load import HUGGING_FACE_PREFIX
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError, listed
from jaxmnt.huggingface.load import load_parameters
from jaxmnt.models.contract import Definition, Params
from jaxmnt.storage import StoragePath

SOURCE_KEY = "run.init_from"


@dataclass(frozen=True)
class LoadedBase:
    """Parameters read from the source of a base."""

    params: Params
    """The parameters in the checkpoint layout, with the dtypes and shardings that were requested."""
    base: Base
    """The description for the manifests of the run."""
    bytes: int
    """Number of bytes that this process has read."""


def source_of(checkpoint: Committed | None, folder: Path | None) -> str:
    """Returns the source that a manifest names: a checkpoint of a run, or a folder of Hugging Face."""
    if folder is not None:
        return f"{HUGGING_FACE_PREFIX}{folder.absolute()}"
    assert checkpoint is not None
    return str(checkpoint.path.absolute())


def usable_source(recorded: Base, configured: str | None) -> str:
    """Returns the recorded source of a base, or if that is gone, the one that the config names, if it is there."""
    is_there = lambda source: source_path(source).is_dir()
    if configured is not None and not is_there(recorded.source) and is_there(configured):
        return configured
    return recorded.source


def source_path(source: str) -> StoragePath:
    """Returns the directory that a source names. It need not exist."""
    if source.startswith(HUGGING_FACE_PREFIX):
        return Path(source.removeprefix(HUGGING_FACE_PREFIX))
    return named_directory(source)


def open_source(source: str, key: str) -> Path | Committed:
    """Returns the folder of Hugging Face, or the checkpoint, that a source names. `key` names the setting or the option
    that gave it.

    Raises `ConfigError` if it is not there, or has adapters only.
    """
    path = source_path(source)
    if not path.is_dir():
        raise ConfigError(f"{key}: the base {source} is not there; name the place to which it has moved")
    if source.startswith(HUGGING_FACE_PREFIX):
        assert isinstance(path, Path)
        return path
    checkpoint = find(source, key)
    check_without_adapters(checkpoint, key)
    return checkpoint


def check_without_adapters(checkpoint: Committed, key: str) -> None:
    """Raises `ConfigError` if the checkpoint is one of a run with adapters, which does not have all parameters."""
    if checkpoint.manifest.base is not None:
        raise ConfigError(
            f"{key}: {checkpoint.path} has adapters only; merge them with their base (python -m jaxmnt.convert to-hf "
            f"{checkpoint.path} FOLDER), and name hf:FOLDER"
        )


def load_base(
    source: str,
    definition: Definition,
    abstract: Params,
    identity: Identity,
    *,
    key: str = SOURCE_KEY,
    recorded: Base | None = None,
    frozen_names: set[str] | None = None,
    owner: str = "this run",
    spread: bool = False,
) -> LoadedBase:
    """Returns the parameters in `abstract`, which has None in place of those that are not requested, from `source`.

    `definition` is that of the model, and `frozen_names` has the names of the parameters that belong to the base, such
    as params/norm/scale (default: all). They are compared with `recorded`, if it is given. It determines the dtype in
    which the base is read, before it is cast to that of `abstract`. `key` names the setting or the option that gave the
    source, and `owner` what was trained on the base. With `spread`, each replica reads a share of a run's checkpoint
    and gets the rest from the others. Raises `ConfigError` in all processes if the source is not there, or is not what
    the run was trained on.
    """
    targets = arrays_by_name({"params": abstract})
    proved_names = targets.keys() if frozen_names is None else targets.keys() & frozen_names
    as_recorded = lambda name, leaf: (
        leaf.dtype if recorded is None or name not in recorded.arrays else recorded.arrays[name].dtype
    )
    read_like = {
        name: jax.ShapeDtypeStruct(leaf.shape, as_recorded(name, leaf), sharding=leaf.sharding)
        for name, leaf in targets.items()
    }
    pinned_source, arrays, bytes_read = _read(source, definition, read_like, identity, key, spread=spread)
    frozen = {name: arrays[name] for name in sorted(proved_names)}
    contents = content_digests(f"digests of the base in {source}", frozen, identity)
    entries = {
        name: Entry(tuple(array.shape), str(array.dtype), contents[name]) for name, array in sorted(frozen.items())
    }
    if recorded is not None:
        _compare(recorded, entries, source, key, owner)
    _cast_all(arrays, targets)
    [params] = unflatten_like({"params": abstract}, arrays).values()
    return LoadedBase(params, Base(pinned_source, entries if recorded is None else recorded.arrays), bytes_read)


def _read(
    source: str,
    definition: Definition,
    targets: dict[str, jax.ShapeDtypeStruct],
    identity: Identity,
    key: str,
    *,
    spread: bool,
) -> tuple[str, dict[str, Array], int]:
    """Returns the source with the checkpoint that it names now, the arrays by name, and the number of bytes that this
    process has read."""
    opened, trouble = None, None
    try:
        opened = open_source(source, key)
    except UserError as error:
        trouble = error
    raise_together(f"open the base {source}", trouble, identity)
    assert opened is not None
    if isinstance(opened, Path):
        loaded = load_parameters(opened, definition.base, nested_arrays(targets)["params"], identity, key=key)
        return source_of(None, opened), arrays_by_name({"params": loaded.params}), loaded.bytes
    # All processes read the checkpoint that process 0 has chosen.
    checkpoint = find(broadcast(f"checkpoint of {source}", str(opened.path), identity), key)
    stored = checkpoint.manifest.arrays
    dtype_of = lambda name, target: stored[name].dtype if name in stored else target.dtype
    as_stored = {
        name: jax.ShapeDtypeStruct(target.shape, dtype_of(name, target), sharding=target.sharding)
        for name, target in targets.items()
    }
    # Arrays of another dtype are read and cast one after another, so that only one of them is there twice.
    is_cast = lambda name: as_stored[name].dtype != targets[name].dtype
    groups = [[name for name in targets if not is_cast(name)], *([name] for name in targets if is_cast(name))]
    arrays: dict[str, Array] = {}
    bytes_read = 0
    try:
        for number, names in enumerate(filter(None, groups)):
            abstract = nested_arrays({name: as_stored[name] for name in names})
            restored = restore(checkpoint, abstract, identity, spread=spread, part=f"group {number} of the base from ")
            group = arrays_by_name(restored.state)
            _cast_all(group, {name: targets[name] for name in names})
            arrays |= group
            bytes_read += restored.bytes
    except DamagedError as damage:
        raise ConfigError(f"{key}: checkpoint {checkpoint.path} is damaged: {damage}; name another copy") from damage
    return source_of(checkpoint, None), arrays, bytes_read


def _cast_all(arrays: dict[str, Array], targets: Mapping[str, Any]) -> None:
    """Replaces the arrays that have another dtype than their targets."""
    for name, target in targets.items():
        if arrays[name].dtype != target.dtype:
            arrays[name] = _cast(arrays[name], target.dtype)


def _cast(array: Array, dtype: Any) -> Array:
    """Returns the array in another dtype, and frees it."""
    cast = jax.jit(lambda array: array.astype(dtype), out_shardings=array.sharding)(array)
    jax.block_until_ready(cast)  # one array at a time, to save memory
    array.delete()
    return cast


def _compare(recorded: Base, entries: dict[str, Entry], source: str, key: str, owner: str) -> None:
    """Raises `ConfigError` if an array of the base is not the recorded one."""
    differing = [name for name, entry in sorted(entries.items()) if recorded.arrays.get(name) != entry]
    if differing:
        raise other_base(differing, source, key, owner)


def other_base(differing: Sequence[str], source: str, key: str, owner: str = "this run") -> ConfigError:
    """Returns the error for a base whose arrays with these names have other digests than the recorded ones."""
    names = listed([parameter_of(name) for name in differing], 1)
    return ConfigError(
        f"{key}: {names} of {source} is not what {owner} was trained on (its digest differs); name the model with "
        "which it began"
    )
