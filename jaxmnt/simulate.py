"""python -m jaxmnt.simulate --gpus N --days D: simulate the failures and restarts of a long run on many GPUs.

Faults occur at random, at the rates of a published run. Restarts and saves are decided by the functions that launchers
and runs use. The tables show where the time goes, and what another start time, number of spare nodes or save interval
would change.
"""

import argparse
from pathlib import Path

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, path_argument, run_command, write_file
from jaxmnt.errors import ConfigError, ExitCode

_BYTES_PER_PARAMETER = 12
"""Bytes of the state that a checkpoint stores for each parameter: float32 parameters, and two moments of Adam."""
_SPARE_SHARE = 0.025
"""Default share of additional nodes that are spare."""
_MAX_GPUS = 1_000_000
_MAX_EXPECTED_FAULTS = 20_000


def main(arguments: list[str]) -> int:
    options = _parse(arguments)

    from jaxmnt.fleet.cases import describe, simulate_cases
    from jaxmnt.fleet.fault_rates import published_rates, read_rates
    from jaxmnt.fleet.picture import draw
    from jaxmnt.fleet.simulation import Fleet
    from jaxmnt.fleet.start_time import start_terms
    from jaxmnt.plan.goal import faults_of
    from jaxmnt.strict_json import json_text

    rates = published_rates() if options.faults is None else read_rates(Path(options.faults))
    nodes = -(-options.gpus // options.gpus_per_node)
    state_bytes = _BYTES_PER_PARAMETER * options.parameters
    saves = faults_of(options.gpus, state_bytes / options.gpus, options.gpus_per_node)
    fleet = Fleet(
        gpus=options.gpus,
        rates=rates,
        start=options.start_seconds,
        blocked=saves.blocked_seconds,
        written=saves.written_seconds,
        gpus_per_node=options.gpus_per_node,
        spare_nodes=round(_SPARE_SHARE * nodes + 0.5) if options.spare_nodes is None else options.spare_nodes,
        save_minutes=options.save_minutes,
        restarts=options.restarts,
        step=options.step_seconds,
        requeue=60 * options.requeue_minutes,
    )
    expected = fleet.faults_per_second * options.days * 86400
    if expected > _MAX_EXPECTED_FAULTS:
        raise ConfigError(
            f"--gpus: {expected:,.0f} faults are expected in {options.days:g} days, more than the "
            f"{_MAX_EXPECTED_FAULTS:,} that a simulation can have; lower --gpus or --days"
        )
    terms = start_terms(options.gpus, nodes, state_bytes)
    composed = sum(term.seconds for term in terms)
    cases = list(simulate_cases(fleet, composed, options.days, options.runs))
    if options.picture is not None:
        title = f"Time that does not go into steps: {options.gpus:,} GPUs, {options.days:g} days"
        write_file(options.picture, draw(cases, title))
    if options.json:
        print(json_text({
            "gpus": options.gpus, "days": options.days, "hours_between_faults": 1 / (3600 * fleet.faults_per_second),
            "faults": [rate._asdict() for rate in rates], "start": [term._asdict() for term in terms],
            "cases": [case.to_json() for case in cases],
        }))  # fmt: skip
    else:
        print("\n".join(describe(fleet, cases, terms, options.days)))
    return ExitCode.FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.simulate", description=__doc__, codes=LOCAL_EXIT_CODES)
    add = parser.add_argument
    add("--gpus", type=int, required=True, metavar="N", help="number of GPUs of the run")
    add("--days", type=float, required=True, metavar="D", help="days that the run lasts")
    add("--faults", type=path_argument, metavar="FILE", help="CSV file of rates; default: those of Llama 3")
    add("--start-seconds", type=float, default=300.0, metavar="S", help="from a new start to its first step (300)")
    add("--spare-nodes", type=int, metavar="N", help="spare nodes of an allocation (2.5 %% of the nodes)")
    add("--save-minutes", type=float, metavar="M", help="time between saves; default: as the run chooses it")
    add("--restarts", type=int, metavar="N", help="launch.restarts; default: no maximum")
    add("--requeue-minutes", type=float, default=30.0, metavar="M", help="wait for a new allocation (30)")
    add("--step-seconds", type=float, default=20.0, metavar="S", help="time of a step (20)")
    add("--parameters", type=float, default=405e9, metavar="P", help="parameters of the model (405e9)")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (8)")
    add("--runs", type=int, default=10, metavar="N", help="runs of each case, with the seeds 0 to N - 1 (10)")
    add("--picture", type=Path, metavar="FILE", help="write an SVG")
    add("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    bounds = {
        "gpus": (1, _MAX_GPUS), "days": (0.01, 3650), "start_seconds": (0, 1e6), "spare_nodes": (0, _MAX_GPUS),
        "save_minutes": (0.01, 1e6), "restarts": (0, 1e6), "requeue_minutes": (0, 1e5), "step_seconds": (1e-3, 1e5),
        "parameters": (1, 1e15), "gpus_per_node": (1, 1024), "runs": (1, 1000),
    }  # fmt: skip
    for name, (minimum, maximum) in bounds.items():
        number = getattr(options, name)
        if number is not None and not minimum <= number <= maximum:
            raise ConfigError(
                f"--{name.replace('_', '-')}: {number:g} is out of range; give {minimum:g} to {maximum:g}"
            )
    return options


if __name__ == "__main__":
    run_command(main)
