"""Loads the adapters with which a run begins (`lora.init_from`)."""

import jax
import numpy as np

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import Base
from jaxmnt.checkpoint.names import arrays_by_name, unflatten_like
from jaxmnt.checkpoint.refs import find
from jaxmnt.checkpoint.restore import raise_together, restore
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError, UserError
from jaxmnt.lora.peft_format import arrays_from, folder_of, read_folder, settings_of
from jaxmnt.models.contract import Params
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.trained import fill_in, select_trained

KEY = "lora.init_from"


def load_adapters(init_from: str, spec: StepSpec, params: Params, base: Base, identity: Identity) -> Params:
    """Returns the parameters with those that train replaced by the ones that `lora.init_from` names. `params` are in
    the checkpoint layout, and `base` describes the base of this run.

    Raises `ConfigError` if the adapters have other settings, or were trained beside another base.
    """
    trained = select_trained(params, spec.trained_axes)
    opened, trouble = None, None
    try:
        is_folder = folder_of(init_from) is not None
        opened = _arrays_of_peft(init_from, spec, trained) if is_folder else _open_run(init_from, spec, base)
    except UserError as error:
        trouble = error
    raise_together(f"open the adapters {init_from}", trouble, identity)
    assert opened is not None
    if isinstance(opened, dict):
        [new] = unflatten_like({"params": trained}, opened).values()
    else:
        checkpoint = opened
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), trained
        )
        new = restore(checkpoint, {"params": abstract}, identity).state["params"]
    is_none = lambda node: node is None
    frozen = jax.tree.map(lambda leaf, mine: leaf if mine is None else None, params, trained, is_leaf=is_none)
    return fill_in(new, frozen)


def _open_run(init_from: str, spec: StepSpec, base: Base) -> Committed:
    """Returns the checkpoint of a run with the same adapters beside the same base."""
    checkpoint = find(init_from, KEY)
    theirs, ours = checkpoint.config.lora, spec.config.lora
    assert ours is not None
    if theirs is None or checkpoint.manifest.base is None:
        raise ConfigError(f"{KEY}: {checkpoint.path} has no adapters; name a run with lora")
    for setting in ("rank", "alpha", "scaling", "targets", "also_train"):
        _check_equal(setting, getattr(theirs, setting), getattr(ours, setting), init_from)
    _check_same_base(checkpoint.manifest.base, base, init_from)
    return checkpoint


def _arrays_of_peft(init_from: str, spec: StepSpec, trained: Params) -> dict[str, jax.Array]:
    """Returns the parameters that train, by name, from a folder of PEFT."""
    folder = folder_of(init_from)
    assert folder is not None and spec.config.lora is not None
    definition, ours = spec.definition, spec.config.lora
    adapters = read_folder(folder, KEY)
    theirs = settings_of(adapters, definition.base, KEY)
    for setting in ("rank", "alpha", "scaling"):
        _check_equal(setting, getattr(theirs, setting), getattr(ours, setting), init_from)
    assert definition.adapters is not None
    if set(theirs.targets) != set(definition.adapters.names):
        raise ConfigError(
            f"lora.targets: the adapters in {init_from} belong to other weights; set [{', '.join(theirs.targets)}]"
        )
    arrays = arrays_from(adapters, definition, KEY)
    targets = arrays_by_name({"params": trained})
    if extra := sorted(arrays.keys() ^ targets.keys()):
        name = extra[0].removeprefix("params/").replace("/", ".")
        raise ConfigError(
            f"lora.also_train: {name} is trained as a whole in only one of {init_from} and this config; set "
            f"[{', '.join(theirs.also_train)}]"
        )

    def place(name: str, like: jax.Array) -> jax.Array:
        array = arrays[name].astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: np.asarray(array[index]))

    return {name: place(name, like) for name, like in targets.items()}


def _check_equal(setting: str, theirs: object, ours: object, init_from: str) -> None:
    if theirs != ours:
        raise ConfigError(f"lora.{setting}: the adapters of {init_from} have {theirs}, not {ours}; set that")


def _check_same_base(theirs: Base, ours: Base, init_from: str) -> None:
    """Raises `ConfigError` if the bases differ. Arrays that were read in different dtypes cannot be compared."""
    for name, array in sorted(theirs.arrays.items()):
        our_array = ours.arrays.get(name)
        if our_array is not None and our_array.dtype == array.dtype and our_array != array:
            raise ConfigError(
                f"{KEY}: the adapters of {init_from} were trained beside another base, {theirs.source}; set "
                "run.init_from to it"
            )
