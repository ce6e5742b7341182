"""Is there room for the checkpoints of a run?"""

from jaxmnt.checkpoint.space import need, shortage
from jaxmnt.config.schema import Config
from jaxmnt.data.sources import open_sources
from jaxmnt.placement.mesh import Hosts
from jaxmnt.preflight.rows import Row, failed, good, warning
from jaxmnt.program.compiled import plan
from jaxmnt.program.state import abstract_state, canonical_abstract, stored_bytes
from jaxmnt.runtime.inputs import fit_to_data
from jaxmnt.runtime.rundir import places
from jaxmnt.telemetry.progress import size


def room_rows(config: Config, hosts: Hosts) -> list[Row]:
    """For the next checkpoint, and for all that are kept. Nothing is compiled."""
    import jax

    data = open_sources(config.data)
    setting = plan(fit_to_data(config, data), data.vocab_size, jax.devices(), hosts)
    state = stored_bytes(canonical_abstract(setting, abstract_state(setting)))
    wanted, keep = need(state, 3, jax.process_count()), config.checkpoint.keep + 1
    root = places(config)[-1]
    if one := shortage(root, wanted):
        return [failed("room", str(root), one, "make room, or choose another checkpoint.dir")]
    if several := shortage(root, wanted, keep):
        return [warning("room", str(root), several, f"{keep} checkpoints will not fit: keep fewer, or make room")]
    return [good("room", str(root), f"for {keep} checkpoints of {size(wanted.bytes)}")]
