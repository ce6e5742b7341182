"""python -m jaxmnt.schema: prints the JSON schema of a config, for editors."""

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, run_command
from jaxmnt.config.describe import json_schema
from jaxmnt.errors import ExitCode


def main(arguments: list[str]) -> int:
    parser = Parser("python -m jaxmnt.schema", description=__doc__, codes=LOCAL_EXIT_CODES)
    parser.parse_args(arguments)
    print(json_schema(), end="")
    return ExitCode.FINISHED


if __name__ == "__main__":
    run_command(main)
