"""python -m jaxmnt.report RUN [RUN …]: a page with charts that shows where the time of a run went and what failed.

RUN is the directory of a finished or running run; several runs are compared. The report also shows what the run cost.
It reads only the files in RUN, and does not need JAX.
"""

import argparse
from pathlib import Path

from jaxmnt.commands import LOCAL_EXIT_CODES, Parser, run_command, write_file
from jaxmnt.errors import ExitCode, printable

_PAGE_FILE = "report.html"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    # These modules import NumPy, which would slow down --help.
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
        default_file = Path(options.run[0]) / _PAGE_FILE if len(options.run) == 1 else Path(_PAGE_FILE)
        page_file = options.output or default_file
        write_file(page_file, page(report))
        print(f"page    {printable(str(page_file))}")
    if options.perfetto is not None:
        write_file(options.perfetto, trace_of(options.run))
        print(f"trace   {printable(str(options.perfetto))}; open it at https://ui.perfetto.dev")
    if options.png is not None:
        from jaxmnt.report.png import write_pngs  # an extra, and slow to import

        png_files = write_pngs(report, options.png)
        print(f"PNGs    {len(png_files)} in {printable(str(options.png))}")
    return ExitCode.FINISHED


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxmnt.report", description=__doc__, codes=LOCAL_EXIT_CODES)
    parser.add_argument("run", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help=f"where to write the page; default RUN/{_PAGE_FILE}, or ./{_PAGE_FILE} for several runs",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=_parse_price, metavar="COST", help="cost of a GPU-hour; default launch.cost_per_gpu_hour"
    )
    output_mode = parser.add_mutually_exclusive_group()
    output_mode.add_argument("--text", action="store_true", help="print the summary only, and write no page")
    output_mode.add_argument("--json", action="store_true", help="print only the whole report, as JSON")
    output_mode.add_argument("--failures", action="store_true", help="print only the failures that ended attempts")
    output_mode.add_argument("--advise", action="store_true", help="print only advice on what to improve")
    output_mode.add_argument(
        "--watch", action="store_true", help="serve the page on this machine and keep it up to date"
    )
    parser.add_argument(
        "--port",
        type=_parse_port,
        default=8700,
        metavar="PORT",
        help="port for --watch; 0 for any free port; default 8700",
    )
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write the charts as PNGs to this folder")
    parser.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write a trace of phases and events for Perfetto"
    )
    return parser.parse_args(arguments)


def _parse_price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 <= price < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number that is at least 0")
    return price


def _parse_port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port from 0 to 65535")
    return int(text)


if __name__ == "__main__":
    run_command(main)
