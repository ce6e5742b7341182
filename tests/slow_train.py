"""python -m slow_train PLAN [arguments of jaxmnt.train]

Trains as jaxmnt.train does, with one process slowed down on purpose. PLAN is "PROCESS PHASE FIRST LAST; …": from the
first to the last of these steps the process sleeps in the phase (data, other or save) for 30 % of a step, as long as
the median of the first ten was. While a process is slow in its saves, all take steps that are PACE longer: with four
processes on two cores the time of a save varies by a tiny model's whole step.
"""

import statistics
import time

from jaxmnt import train
from jaxmnt.commands import run_command
from jaxmnt.config import load_config
from jaxmnt.distributed.identity import identify
from jaxmnt.run.arguments import parse_arguments

SHARE = 0.3
MEASURED = 10
PACE = 0.2


class Slow:
    def __init__(self, plan: str, process: int):
        parts = [part.split() for part in plan.split(";") if part.strip()]
        self.paced = [(int(first), int(last)) for _, phase, first, last in parts if phase == "save"]
        self.mine = [(phase, int(first), int(last)) for number, phase, first, last in parts if int(number) == process]
        self.begun: list[float] = []

    def __call__(self, phase: str) -> None:
        step = len(self.begun)
        if any(phase == slowed and first <= step <= last for slowed, first, last in self.mine):
            times = [after - before for before, after in zip(self.begun, self.begun[1:MEASURED], strict=False)]
            time.sleep(SHARE * (statistics.median(times) + (PACE if phase == "save" else 0.0)))

    def pace(self) -> None:
        if any(first <= len(self.begun) <= last for first, last in self.paced):
            time.sleep(PACE)

    def patch(self) -> None:
        from jaxmnt.checkpoint.saver import Saver
        from jaxmnt.run import input as run_input
        from jaxmnt.training.spec import ControlFlags

        rows, array, save = run_input.training_rows, ControlFlags.array, Saver.save

        def slow_rows(*arguments, **options):
            for row in rows(*arguments, **options):
                self("data")
                yield row

        def slow_array(flags, **wishes):
            self.begun.append(time.perf_counter())
            self("other")
            self.pace()
            return array(flags, **wishes)

        def slow_save(*arguments, **options):
            self("save")
            return save(*arguments, **options)

        run_input.training_rows, ControlFlags.array, Saver.save = slow_rows, slow_array, slow_save


def main(arguments: list[str]) -> int:
    plan, *rest = arguments
    options = parse_arguments(rest)
    identity = identify(load_config(options.config, options.overrides).cluster)
    Slow(plan, identity.process_id).patch()
    return train.main(rest)


if __name__ == "__main__":
    run_command(main)
