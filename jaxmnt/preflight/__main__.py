"""Implements the command that checks the hosts of a run. Its help text is in `arguments.py`."""

import sys
from argparse import Namespace
from contextlib import ExitStack
from functools import partial

from jaxmnt.commands import run_command
from jaxmnt.config import load_config
from jaxmnt.config.load import as_override
from jaxmnt.config.schema import Cluster, Config
from jaxmnt.distributed.gpu_settings import prepare
from jaxmnt.distributed.identity import Identity, identify, survey
from jaxmnt.errors import ConfigError, ExitCode, UserError, report
from jaxmnt.output import final_exit_code
from jaxmnt.preflight.arguments import parse_arguments
from jaxmnt.preflight.table import Row, failed_row, failures, table, to_json
from jaxmnt.strict_json import json_text
from jaxmnt.telemetry.progress import Work, working


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    if options.explain:
        cluster = load_config(options.config, options.overrides).cluster if options.config else Cluster()
        return explain(cluster, as_json=options.json)
    if options.config is None:
        raise ConfigError("--config: missing; give the config of the run")
    start_timeout = as_override("cluster.start_timeout_seconds", options.wait)
    config = load_config(options.config, [*options.overrides, start_timeout])
    identity = identify(config.cluster)
    with working("starting" if identity.process_id == 0 else "") as work:
        return _check(config, options, identity, work)


def _check(config: Config, options: Namespace, identity: Identity, work: Work) -> int:
    """Joins the other processes, runs all checks and reports their results. Returns the exit code."""
    prepare(config)

    from jaxmnt.distributed.process_group import joined_process_group
    from jaxmnt.distributed.termination import ExitHandler
    from jaxmnt.preflight.checks import run_all_checks
    from jaxmnt.preflight.links import configure_nccl_logs
    from jaxmnt.run.changes import digest_of_data
    from jaxmnt.run.compile_cache import cache_single_cpu_programs_only

    cache_single_cpu_programs_only()
    exit_handler = ExitHandler(identity.label)
    nccl_logs = config.run_dir / "preflight" if options.nccl_debug else None
    if nccl_logs is not None:
        configure_nccl_logs(nccl_logs)

    def check() -> int:
        try:
            with ExitStack() as stack:
                # The status line is cleared at the end, even if another thread ends the process.
                stack.callback(work.does, "")
                stack.enter_context(exit_handler.with_hook(lambda _: work.does("")))
                data_digest = partial(digest_of_data, config, check_files=identity.process_id == 0)
                heartbeat = stack.enter_context(joined_process_group(identity, config, exit_handler, data_digest))
                work.does("checking" if identity.process_id == 0 else "")
                rows, has_failed = run_all_checks(config, identity, heartbeat, nccl_logs, options.calibrate)
        except UserError as error:
            if identity.process_id == 0 and options.json:
                print(to_json([failed_row("roll call", identity.label or "this host", str(error), "")]), flush=True)
            raise
        if identity.process_id == 0:
            _print_rows(rows, as_json=options.json)
        return ExitCode.PREFLIGHT if has_failed else ExitCode.FINISHED

    return exit_handler.finish(
        final_exit_code(report(check, debug=options.debug, where=identity.label)), at_once=not identity.alone
    )


def _print_rows(rows: list[Row], *, as_json: bool) -> None:
    """Prints the rows, and an error message if any of them failed."""
    print(to_json(rows) if as_json else table(rows), flush=True)
    if failed_rows := failures(rows):
        summary = f"{len(failed_rows)} of {len(rows)} checks failed. {failed_rows[0]}"
        print(f"jaxmnt: error: {summary}", file=sys.stderr, flush=True)


def explain(cluster: Cluster, *, as_json: bool = False) -> int:
    """Prints which process of the run this one would be, and the variables that determine it."""
    result = survey(cluster)
    identity = result.identity
    devices = "all that it sees" if identity.local_devices is None else ", ".join(map(str, identity.local_devices))
    position = "alone" if identity.alone else f"process {identity.process_id} of {identity.processes}"
    lines = {"this process": position, "according to": result.source or "nobody: a single process"}
    if not identity.alone:
        lines["coordinator"] = str(identity.coordinator)
    lines["GPUs"] = devices
    if as_json:
        print(json_text(lines | {"read": result.values_read, "ignored": result.ignored_launchers}, indent=1))
        return ExitCode.FINISHED
    read = [("read", f"{name}={text}") for name, text in result.values_read.items()]
    ignored = [("ignored", f"{launcher}: {text}") for launcher, text in result.ignored_launchers.items()]
    for name, text in [*lines.items(), *read, *ignored]:
        print(f"{name:<13} {text}")
    return ExitCode.FINISHED


if __name__ == "__main__":
    run_command(main)
