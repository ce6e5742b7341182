"""Finds and loads the adapters with which a run begins: of another run, or of PEFT (`lora.init_from`)."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Base
from jaxmnt.checkpoint.names import arrays_by_name, parameter_of, unflatten_like
from jaxmnt.checkpoint.refs import find
from jaxmnt.checkpoint.restore import raise_together, restore
from jaxmnt.config.schema import Config
from jaxmnt.distributed.coordination import broadcast
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.lora.peft_format import arrays_from, fingerprint, folder_of, read_folder, settings_of
from jaxmnt.models.contract import Params
from jaxmnt.models.registry import define_model

KEY = "lora.init_from"


@dataclass(frozen=True)
class AdapterOrigin:
    """The adapters with which a run begins."""

    checkpoint: Committed | None
    """The checkpoint of another run; None for adapters of PEFT."""
    arrays: dict[str, np.ndarray]
    """The float32 arrays of PEFT, by their names in a checkpoint."""

    @property
    def base(self) -> Base | None:
        """The base that the adapters were trained beside; None if it is not known."""
        return None if self.checkpoint is None else self.checkpoint.manifest.base


def check_branch(checkpoint: Committed, config: Config) -> None:
    """Raises `ConfigError` if a branch would have other adapters than the checkpoint, or none."""
    key = "run.fork_from"
    if (config.lora is None) != (checkpoint.manifest.base is None):
        has = "no adapters" if config.lora is not None else "adapters"
        raise ConfigError(f"{key}: {checkpoint.path} has {has}; give the branch the section lora of its origin")
    if config.lora is None:
        return
    if config.lora.init_from is not None:
        raise ConfigError(f"{KEY}: a branch goes on with the adapters of its origin; remove it")
    _check_same_adapters(checkpoint.config, config, f"{key}: {checkpoint.path}", scale=False)


def check_adapters(init_from: str, config: Config) -> None:
    """Raises `ConfigError` if a run of this config cannot begin with these adapters. Does not compare their bases."""
    folder = folder_of(init_from)
    if folder is None:
        checkpoint = find(init_from, KEY)
        if checkpoint.config.lora is None or checkpoint.manifest.base is None:
            raise ConfigError(f"{KEY}: {checkpoint.path} has no adapters; name a run with lora")
        _check_same_adapters(checkpoint.config, config, f"{KEY}: {checkpoint.path}")
        return
    theirs = settings_of(read_folder(folder, KEY), define_model(config.model), KEY)
    _check_same_adapters(config.model_copy(update={"lora": theirs}), config, f"{KEY}: {folder}")


def _check_same_adapters(theirs: Config, ours: Config, where: str, *, scale: bool = True) -> None:
    """Raises `ConfigError` if two configs have adapters of other weights, or with another rank or, unless `scale` is
    False, another scale."""
    assert theirs.lora is not None and ours.lora is not None
    for setting in ("rank", "alpha", "scaling") if scale else ("rank",):
        required, configured = getattr(theirs.lora, setting), getattr(ours.lora, setting)
        if required != configured:
            raise ConfigError(f"{where} has lora.{setting}={required}, not {configured}; set that")
    adapters = [define_model(config.model, config.lora).adapters for config in (theirs, ours)]
    first, second = adapters
    assert first is not None and second is not None
    for setting, names, configured_names in (
        ("targets", first.names, second.names),
        ("also_train", first.also_trained, second.also_trained),
    ):
        if names != configured_names:
            raise ConfigError(f"{where} has other lora.{setting}; set [{', '.join(names)}]")


def open_adapters(init_from: str, config: Config, identity: Identity) -> AdapterOrigin:
    """Returns the adapters that all processes begin with. Raises `ConfigError` in all of them if they do not fit, or
    differ between processes."""
    origin, mark, trouble = None, "", None
    folder = folder_of(init_from)
    try:
        check_adapters(init_from, config)
        if folder is None:
            origin = AdapterOrigin(find(init_from, KEY), {})
        else:
            arrays = arrays_from(read_folder(folder, KEY), define_model(config.model, config.lora), KEY)
            origin, mark = AdapterOrigin(None, arrays), fingerprint(folder, KEY)
    except UserError as error:
        trouble = error
    raise_together(f"open the adapters {init_from}", trouble, identity)
    assert origin is not None
    if origin.checkpoint is not None:  # all processes read the checkpoint that process 0 has chosen
        path = broadcast(f"adapters of {init_from}", str(origin.checkpoint.path), identity)
        return AdapterOrigin(find(path, KEY), {})
    if broadcast(f"adapters of {init_from}", mark, identity) != mark:
        trouble = ConfigError(
            f"{KEY}: the files in {folder} differ between {identity.label} and process 0; give all hosts the same files"
        )
    raise_together(f"compare the adapters {init_from}", trouble, identity)
    return origin


def load_adapters(origin: AdapterOrigin, trained: Params, identity: Identity) -> Params:
    """Returns the parameters that train, from the origin. `trained` has arrays like them, with None in place of frozen
    parameters."""
    if origin.checkpoint is not None:
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), trained
        )
        params: Params = restore(origin.checkpoint, {"params": abstract}, identity).state["params"]
        return params
    targets = arrays_by_name({"params": trained})
    assert origin.arrays.keys() == targets.keys(), sorted(map(parameter_of, origin.arrays.keys() ^ targets.keys()))

    def place(name: str, like: jax.Array) -> jax.Array:
        array = origin.arrays[name].astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: np.asarray(array[index]))

    arrays = {name: place(name, like) for name, like in targets.items()}
    [new] = unflatten_like({"params": trained}, arrays).values()
    return new
