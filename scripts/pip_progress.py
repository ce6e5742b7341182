"""Shortens pip's output to what a person wants to see: a line for each package as it arrives."""

import re
import sys


def main() -> None:
    live = sys.stdout.isatty()
    packages = 0
    for line in sys.stdin:
        if match := re.match(r"Collecting ([\w.\-]+)", line):
            packages += 1
            if live:
                print(f"\r\x1b[K  {packages} packages: {match.group(1)}", end="", flush=True)
        elif match := re.match(r"\s+Downloading (\S+?)(?:-\d\S*)? \((\S+ MB)\)", line):
            print(
                f"{chr(13)}{chr(27)}[K" * live + f"  downloading {match.group(1)} ({match.group(2)})",
                flush=True,
            )
        elif line.startswith("Installing collected"):
            print(f"{chr(13)}{chr(27)}[K" * live + f"  unpacking {line.count(',') + 1} packages …", flush=True)
        elif line.startswith("ERROR"):
            print(line, end="", flush=True)


if __name__ == "__main__":
    main()
