"""python -m jaxmnt.schema: prints the JSON schema of a config file, for editors."""

import argparse

from jaxmnt.config.describe import json_schema
from jaxmnt.errors import ExitCode, run_command


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m jaxmnt.schema", description=__doc__)
    parser.parse_args(arguments)
    print(json_schema(), end="")
    return ExitCode.FINISHED


if __name__ == "__main__":
    run_command(main)
