"""A sink that writes the numbers of a run as CSV: one line for each number, with its step and name."""

import csv

from jaxmnt.telemetry.sinks import SinkRun


class CsvSink:
    """jaxmnt makes one instance in process 0 and calls all of its methods from a thread of the sink's own."""

    def __init__(self, run: SinkRun):
        """Opens the file; a run that resumes appends to it."""
        path = run.directory / "numbers.csv"
        is_new = not path.exists()
        self._file = path.open("a", encoding="utf-8", newline="")
        self._lines = csv.writer(self._file)
        if is_new:
            self._lines.writerow(["step", "unix_seconds", "name", "number"])

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        """Writes the numbers of a step; names are such as train/loss and eval/loss."""
        self._lines.writerows([step, f"{time:.3f}", name, number] for name, number in sorted(values.items()))

    def close(self) -> None:
        """Closes the file at the end of the run."""
        self._file.close()
