"""The faults that a drill can inject: when and into which process, and which event should report each."""

from dataclasses import dataclass

from jaxmnt.errors import ConfigError, suggest

ALL_PROCESSES = None
"""The victim of a fault that happens in all processes."""


@dataclass(frozen=True)
class Fault:
    """A fault that happens in one process or in all processes of a run."""

    name: str
    act: str
    """The action that causes the fault, such as kill or raise; `FaultInjector` implements it."""
    moment: str
    """The part of the run in which the fault happens, such as step or save; see `FaultInjector.arm`."""
    victim: int | None
    """Number of the process in which the fault happens; None for all processes."""
    expected_event: str
    """Kind of the event that should report the fault."""
    offset: int = 6
    """The number of the step, save or batch read at which the fault happens, counted from the start of the processes.

    For a poisoned batch it is the step of the run.
    """
    ends_processes: bool = True
    """True if the fault ends the processes."""
    namespace: bool = False
    """True if the fault needs a separate network namespace, in which connections can be cut."""
    resumes: bool = False
    """True if the fault can only happen in a start that resumes from a checkpoint."""


_ORDERLY_STOP = Fault("preempt all", "terminate", "mid-step", ALL_PROCESSES, "preempted")

FAULTS = (
    # A fault that does not end the processes shares a start with the next fault that does.
    Fault("NaN in a batch", "poison", "batch", ALL_PROCESSES, "bad_step", offset=3, ends_processes=False),
    Fault("full disk in a save", "fill", "step", 1, "checkpoint_failed", offset=6, ends_processes=False),
    Fault("kill in a step", "kill", "mid-step", 1, "peer_lost", offset=18),
    Fault("kill in a save", "kill", "save", 1, "peer_lost", offset=2),
    Fault("kill in restore", "kill", "restore", 1, "peer_lost", resumes=True),
    Fault("kill while idle", "kill", "idle", 1, "peer_lost"),
    Fault("kill in compilation", "kill", "compile", 1, "peer_lost"),
    Fault("kill the coordinator", "kill", "mid-step", 0, "peer_lost"),
    Fault("damaged checkpoint", "damage", "start", 0, "checkpoint_damaged", ends_processes=False, resumes=True),
    Fault("preempt one", "terminate", "step", 1, "preempted"),
    _ORDERLY_STOP,
    Fault("stopped process", "stop", "mid-step", 1, "peer_lost"),
    Fault("exception in a step", "raise", "step", 1, "peer_lost"),
    Fault("exception in prefetch", "raise", "prefetch", 1, "peer_lost"),
    Fault("exception in a thread", "raise in a thread", "step", 0, "peer_lost"),
    Fault("exit 0", "exit", "step", 1, "peer_lost"),
    Fault("hang in reading data", "hang", "prefetch", 1, "hang"),
    Fault("cut link", "cut", "step", 1, "hang", namespace=True),
)

CORE_FAULTS = (
    "kill in a step", "kill in a save", "kill the coordinator", "preempt one", "hang in reading data", "cut link",
)  # fmt: skip
"""The faults that are injected with the second and further numbers of processes, unless the user chooses faults."""


def select_faults(names: str | None) -> list[Fault]:
    """Returns the faults whose names are given, separated by commas, in the order of `FAULTS`; all faults for None.

    Raises `ConfigError` for an unknown name.
    """
    all_names = [fault.name for fault in FAULTS]
    requested = all_names if names is None else [name.strip() for name in names.split(",")]
    for name in requested:
        if name not in all_names:
            raise ConfigError(f"--faults: unknown fault {name!r}; {suggest(name, all_names)}")
    return [fault for fault in FAULTS if fault.name in requested]


def plan_starts(faults: list[Fault]) -> list[list[Fault]]:
    """Divides faults among starts of the processes, and returns the faults of each start.

    No fault ends the last start. If a fault needs a checkpoint and no earlier fault leaves one, two orderly stops come
    first.
    """
    starts: list[list[Fault]] = [[]]
    for fault in faults:
        if fault.resumes and len(starts) == 1:
            starts = [[*starts[0], _ORDERLY_STOP], [_ORDERLY_STOP], []]
        # All faults of a start run either inside a network namespace or outside.
        if any(fault.namespace != earlier.namespace for earlier in starts[-1]):
            starts.append([])
        starts[-1].append(fault)
        if fault.ends_processes:
            starts.append([])
    return starts
