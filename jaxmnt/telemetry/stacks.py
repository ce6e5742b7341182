"""Writes the stacks of all threads, the main thread's first."""

import faulthandler
import sys
import threading
from io import BufferedIOBase
from typing import BinaryIO


def write_stacks(file: BinaryIO | BufferedIOBase) -> None:
    """Writes the stack of each thread, innermost call first, to a file, which must have a descriptor.

    Source lines are left out, because reading them could hang where the run does. The main thread is written
    separately, since `faulthandler` lists it last and stops after 100 threads.
    """
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main or 0)
    lines = [f"Main thread 0x{main or 0:016x} (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    file.write(("\n".join(lines) + "\n\n").encode(errors="replace"))
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
