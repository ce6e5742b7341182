"""What a person should know about how a config is split: said by the plan and at the start of a run."""

from typing import Any

from jaxmnt.program.setting import Setting
from jaxmnt.program.state import abstract_state, moving_bytes
from jaxmnt.telemetry.progress import size


def notes(setting: Setting) -> list[str]:
    """What lies otherwise than a plain reading of the config would have it."""
    model, placement, found = setting.config.model, setting.placement, []
    for axis, key, extent in (
        ("vocab", "model.vocab_size", model.vocab_size),
        ("mlp", "model.intermediate_size", model.intermediate_size),
    ):
        if axis in setting.layout.dimensions:
            placed = len(setting.layout.dimensions[axis].slots)
            ways = placement.ways(axis)
            found.append(f"{key}: {extent} is padded with zeros to {placed}, which divides among {ways} devices")
    assert model.num_kv_heads
    if model.num_kv_heads % placement.sizes["model"]:
        found.append(
            f"model.num_kv_heads: {model.num_kv_heads} do not divide among mesh.model {placement.sizes['model']}: "
            "their weights are stored once, and each device computes the heads that its queries need"
        )
    empty = sum(layer is None for row in setting.layer_slots for layer in row)
    if empty:
        found.append(f"pipeline: {empty} of {empty + model.num_layers} places for layers are empty: stages are uneven")
    facts = schedule_facts(setting)
    if facts and facts["chunks"] > 1 and facts["microbatches"] % facts["stages"]:
        found.append(
            f"pipeline: {facts['microbatches']} microbatches do not fill rounds of {facts['stages']} stages; "
            f"stages idle for {facts['idle_percent']} % of the time; use a multiple of {facts['stages']}"
        )
    moving = moving_bytes(setting, abstract_state(setting))
    if moving:
        found.append(f"checkpoint: it is stored in another layout; saving takes {size(moving)} more of a device")
    if facts and facts["microbatches"] < facts["stages"]:
        found.append(
            f"pipeline: {counted(facts['microbatches'])} for {facts['stages']} stages; "
            f"stages idle for {facts['idle_percent']} % of the time; lower train.microbatch_size"
        )
    return found


def counted(microbatches: int) -> str:
    return f"{microbatches} microbatch{'es' * (microbatches > 1)}"


def schedule_facts(setting: Setting) -> dict[str, Any] | None:
    """The pipeline's schedule in numbers; None without a pipeline. Idle is a share of a stage's time."""
    schedule = setting.schedule
    if schedule.stages == 1:
        return None
    share = schedule.idle_share()
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "chunks": schedule.chunks,
        "microbatches": schedule.microbatches,
        "ticks": schedule.ticks,
        "idle_percent": round(100 * share / (1 + share), 1),
        "in_flight": [schedule.in_flight(stage) for stage in range(schedule.stages)],
    }
