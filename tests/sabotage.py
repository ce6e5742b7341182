"""Trains as jaxmnt.train does, with parts of it slowed down, or with a process that cannot go on.

The environment variable SABOTAGE says how, in JSON: {"seconds": {"compile": 90, …}, "dies": 2, "marks": FOLDER}.
Every slowed part leaves an empty file PART-PROCESS in the folder as it begins.
"""

import json
import os
import sys
import time
from pathlib import Path

from jaxmnt import train
from jaxmnt.commands import run_command

PARTS = {
    "compile": ("jaxmnt.run.compiling", "compile_program"),
    "restore": ("jaxmnt.run.starting_state", "restore"),
    "evaluate": ("jaxmnt.run.evaluate", "to_devices"),
    "save": ("jaxmnt.checkpoint.saver", "_wait_until_written"),
    "step": ("jaxmnt.run.loop", "_is_due"),
}


def main(arguments: list[str]) -> int:
    told, process = json.loads(os.environ["SABOTAGE"]), os.environ.get("JAX_PROCESS_ID", "0")
    if told.get("dies") == int(process) and not os.environ.get("SPARED"):
        print("no such device", file=sys.stderr)
        os._exit(1)
    for part, seconds in told.get("seconds", {}).items():
        slow_down(part, seconds, Path(told["marks"]) / f"{part}-{process}")
    return train.main(arguments)


def slow_down(part: str, seconds: float, mark: Path) -> None:
    name, function = PARTS[part]
    __import__(name)
    module = sys.modules[name]
    original = getattr(module, function)

    def slowly(*arguments, **named):
        mark.touch()
        time.sleep(seconds)
        return original(*arguments, **named)

    setattr(module, function, slowly)


if __name__ == "__main__":
    run_command(main)
