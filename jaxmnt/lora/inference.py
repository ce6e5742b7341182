"""Loads the model of a run with adapters for inference."""

from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.names import arrays_by_name
from jaxmnt.checkpoint.restore import restore
from jaxmnt.distributed.identity import Identity
from jaxmnt.lora.base import load_base, usable_source
from jaxmnt.training.spec import StepSpec
from jaxmnt.training.state import abstract_state, canonical_abstract, model_state, saved_state
from jaxmnt.training.trained import fill_in, select_frozen


def restore_with_base(checkpoint: Committed, spec: StepSpec, base: str | None, key: str = "--base") -> dict[str, Any]:
    """Returns the parameters and buffers of a checkpoint of a run with adapters, in the checkpoint layout. `base` is
    the place of the base if it has moved, which the option `key` gives. If the spec has no adapters, all parameters are
    those of the base.

    Raises `ConfigError` if the base is not there or is not what the run was trained on, and `DamagedError` for a
    damaged checkpoint.
    """
    recorded = checkpoint.manifest.base
    assert recorded is not None
    source = base or usable_source(recorded, checkpoint.config.run.init_from)
    target = model_state(canonical_abstract(spec, abstract_state(spec)))
    stored = {name.partition("/")[0] for name in checkpoint.manifest.arrays}
    target = {part: tree for part, tree in target.items() if part == "params" or part in stored}
    frozen_names = set(recorded.arrays)
    if spec.config.lora is None:
        buffers = {part: tree for part, tree in target.items() if part != "params"}
        restored = restore(checkpoint, buffers, Identity()).state if buffers else {}
        loaded = load_base(
            source, spec.definition, target["params"], Identity(), key=key, recorded=recorded, frozen_names=frozen_names
        )
        return restored | {"params": loaded.params}
    restored = restore(checkpoint, saved_state(spec, target), Identity()).state
    frozen = select_frozen(target["params"], spec.trained_axes)
    assert arrays_by_name({"params": frozen}).keys() == frozen_names
    loaded = load_base(source, spec.definition, frozen, Identity(), key=key, recorded=recorded)
    return restored | {"params": fill_in(restored["params"], loaded.params)}
