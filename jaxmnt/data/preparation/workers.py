"""Running parts in several processes, with shared progress, and none left behind when one fails or is killed."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

from jaxmnt.errors import UserError

_POLL_SECONDS = 0.2

Work = Callable[[Any, Callable[[int], None]], Any]
"""Does one item; calls its second argument with the bytes that it has read."""


class StoppedError(Exception):
    """Raised in a worker whose result nobody waits for any more."""


_shared: tuple[Any, Any, Work] | None = None
"""In a worker: bytes done, whether to stop, and the work."""


def run(
    items: Sequence[Any], make_work: Callable[[], Work], workers: int, progress: Callable[[int], None]
) -> Iterator[Any]:
    """The result of the work on each item, as they come; `progress` is called with the bytes done so far.

    `make_work` is called once in every worker and must be picklable, like items and results. With one worker
    everything happens in this process. The first error ends all.
    """
    if workers == 1 or len(items) < 2:
        yield from _run_here(items, make_work(), progress)
        return
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Value("b", 0)
    pool = ProcessPoolExecutor(min(workers, len(items)), context, _start_worker, (done, stop, make_work))
    try:
        pending = {pool.submit(_do, item) for item in items}
        while pending:
            finished, pending = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
            progress(done.value)
            for future in finished:
                yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker was killed, perhaps because memory ran out; give the same command again with fewer --workers: "
            "it goes on with the parts that are not done"
        ) from error
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


def _run_here(items: Sequence[Any], work: Work, progress: Callable[[int], None]) -> Iterator[Any]:
    total = 0

    def advance(count: int) -> None:
        nonlocal total
        total += count
        progress(total)

    for item in items:
        yield work(item, advance)


def _start_worker(done: Any, stop: Any, make_work: Callable[[], Work]) -> None:
    global _shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too, and tells us
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_leave_with_parent, args=(parent.sentinel,), daemon=True).start()
    _shared = done, stop, make_work()


def _leave_with_parent(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _do(item: Any) -> Any:
    assert _shared is not None
    done, stop, work = _shared

    def advance(count: int) -> None:
        if stop.value:
            raise StoppedError
        with done.get_lock():
            done.value += count

    return work(item, advance)
