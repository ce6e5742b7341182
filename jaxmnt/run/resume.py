"""The state that a run begins with: new, its own, or another run's."""

from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.manifest import DamagedError
from jaxmnt.checkpoint.restore import restore
from jaxmnt.config.schema import Config
from jaxmnt.data.sources import Sources
from jaxmnt.distributed.identity import Identity
from jaxmnt.errors import ConfigError
from jaxmnt.run.rundir import ResumePoint, fall_back
from jaxmnt.telemetry.events import Events
from jaxmnt.telemetry.progress import StatusLine
from jaxmnt.training.compile import Program

REQUIRED_PARTS = ("params", "optimizer", "counters")
"""Every checkpoint has these parts of the state; others may have been added since it was written."""


def starting_state(
    config: Config,
    data: Sources,
    program: Program,
    start: ResumePoint,
    identity: Identity,
    events: Events,
    status: StatusLine,
) -> tuple[ResumePoint, Any]:
    """The state to go on from, and where that is: earlier than `start` if its checkpoint turns out to be damaged."""
    while (checkpoint := start.checkpoint) is not None:
        wanted = wanted_of(program, checkpoint, parameters_only=start.kind == "init")
        spread = _spreads(config, program, identity)
        try:
            restored = restore(checkpoint, wanted, identity, verify=config.checkpoint.verify, spread=spread)
        except DamagedError as damage:
            events.write("checkpoint_damaged", step=checkpoint.step, why=str(damage))
            start = fall_back(start, damage, config, data, identity)
            for remark in start.remarks:
                status.line(f"WARNING {remark}")
            found = "from the start" if start.checkpoint is None else f"from step {start.step}"
            status.line(f"WARNING going on {found} instead")
            continue
        events.write(
            "restore",
            step=checkpoint.step,
            source=start.kind,
            bytes=restored.bytes,
            read_seconds=restored.read_seconds,
            verify_seconds=restored.verify_seconds,
        )
        return start, completed(program, program.from_canonical(restored.state))
    return start, program.init()


def wanted_of(program: Program, checkpoint: Committed, *, parameters_only: bool = False) -> dict[str, Any]:
    """The abstract state of what is taken from the checkpoint, by part."""
    abstract = program.canonical_abstract_state
    if parameters_only:
        return {"params": abstract["params"]}
    stored = {name.partition("/")[0] for name in checkpoint.manifest.arrays}
    if missing := sorted(set(REQUIRED_PARTS) - stored):
        raise ConfigError(f"checkpoint {checkpoint.path} lacks {missing[0]}; it was not written by a training run")
    return {part: tree for part, tree in abstract.items() if part in stored}


def completed(program: Program, state: dict[str, Any]) -> dict[str, Any]:
    """The state with the parts that the checkpoint does not have, as at the start of a run."""
    missing = [part for part in program.abstract_state if part not in state]
    if not missing:
        return state
    fresh = program.init()
    return {part: state.get(part, fresh[part]) for part in program.abstract_state}


def _spreads(config: Config, program: Program, identity: Identity) -> bool:
    """Whether replicas share the reading. On CPU, and inside a host, the file cache is quicker than the exchange."""
    if config.checkpoint.read != "auto":
        return config.checkpoint.read == "spread"
    return not identity.alone and program.placement.mesh.devices.flat[0].platform != "cpu"
