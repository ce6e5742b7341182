"""python -m jaxmnt.drill.start PROCESSES DEVICES PLAN -- [arguments of jaxmnt.train]

Starts processes on this machine that inject the faults of a plan, and exits with the code that `jaxmnt.launch local`
would return.
"""

from jaxmnt.commands import run_command
from jaxmnt.launch.local import launch, local_run
from jaxmnt.launch.restarts import Restarts


def main(arguments: list[str]) -> int:
    processes, devices, plan, _, *train_arguments = arguments
    local = local_run(train_arguments, int(devices), ("jaxmnt.drill.inject", plan, "--"))
    return launch(local, int(processes), Restarts(0))


if __name__ == "__main__":
    run_command(main)
