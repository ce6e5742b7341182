"""python -m jaxmnt.report RUN [RUN …]: where the time of a run went, what it cost, what failed; as a page with charts.

RUN is a run directory, of a run that is over or under way. Several are compared. Nothing but the files in it is read;
no JAX is needed.
"""

import argparse
from pathlib import Path

from jaxmnt.commands import HERE, Parser, run_command, write_file
from jaxmnt.errors import ExitCode, printable

_PAGE = "report.html"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    # They import NumPy, for which --help shall not wait.
    from jaxmnt.report.advice import advice_text
    from jaxmnt.report.contents import report_of
    from jaxmnt.report.page import as_json, page
    from jaxmnt.report.perfetto import trace_of
    from jaxmnt.report.text import failures_text, summary_text
    from jaxmnt.report.watch import serve

    if options.watch:
        return serve(options.run, options.price, options.port)
    report = report_of(options.run, options.price)
    if options.json:
        print(as_json(report, indent=2))
        return ExitCode.FINISHED
    if options.failures:
        print(failures_text(report))
        return ExitCode.FINISHED
    if options.advise:
        print(advice_text(report))
        return ExitCode.FINISHED
    print(summary_text(report))
    if not options.text:
        where = options.output or (Path(options.run[0]) / _PAGE if len(options.run) == 1 else Path(_PAGE))
        write_file(where, page(report))
        print(f"page    {printable(str(where))}")
    if options.perfetto is not None:
        write_file(options.perfetto, trace_of(options.run))
        print(f"trace   {printable(str(options.perfetto))}; open it at https://ui.perfetto.dev")
    if options.png is not None:
        from jaxmnt.report.png import write_pngs  # an extra, and slow to import

        written = write_pngs(report, options.png)
        print(f"PNGs    {len(written)} in {printable(str(options.png))}")
    return ExitCode.FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.report", description=__doc__, codes=HERE)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help=f"where to write the page; default RUN/{_PAGE}, and ./{_PAGE} of several runs",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=_price, metavar="COST", help="what an hour of a GPU costs; default launch.cost_per_gpu_hour"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--text", action="store_true", help="print the summary, and write no page")
    instead.add_argument(
        "--json", action="store_true", help="print every number of the report as JSON, and nothing else"
    )
    instead.add_argument("--failures", action="store_true", help="print what ended attempts, and nothing else")
    instead.add_argument("--advise", action="store_true", help="print what could be better, and nothing else")
    instead.add_argument("--watch", action="store_true", help="serve the page on this machine, and keep it up to date")
    parser.add_argument(
        "--port", type=_port, default=8700, metavar="PORT", help="for --watch; default 8700; 0: any free one"
    )
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write the charts there as PNGs")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write phases and events as a trace for Perfetto"
    )
    return parser.parse_args(arguments)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 0 or more")
    return price


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port, 0 to 65535")
    return int(text)


if __name__ == "__main__":
    run_command(main)
