"""The faults that a drill can force: where, on whom, and what should be heard of them."""

from dataclasses import dataclass

from jaxmnt.errors import ConfigError, nearest

EVERYONE = None


@dataclass(frozen=True)
class Fault:
    """One fault. `inject.py` knows the moments and the acts."""

    name: str
    act: str
    moment: str
    victim: int | None
    """A process's number; None is all of them."""
    heard: str
    """The kind of event by which the others, or all, should know it."""
    offset: int = 6
    """At which step or save after the start of the processes it comes."""
    ends: bool = True
    """Whether the processes end over it."""
    namespace: bool = False
    """Whether the processes are put into a network of their own, whose connections may be cut."""
    resumes: bool = False
    """Whether it comes in a start that has a checkpoint to go on from."""


_ORDERLY = Fault("preempt all", "terminate", "mid-step", EVERYONE, "preempted")

FAULTS = (
    # What does not end the processes comes first: it happens in the same start as the next that does.
    Fault("NaN in a batch", "poison", "batch", EVERYONE, "bad_step", offset=3, ends=False),
    Fault("full disk in a save", "fill", "step", 1, "checkpoint_failed", offset=6, ends=False),
    Fault("kill in a step", "kill", "mid-step", 1, "peer_lost", offset=18),
    Fault("kill in a save", "kill", "save", 1, "peer_lost", offset=2),
    Fault("kill in restore", "kill", "restore", 1, "peer_lost", resumes=True),
    Fault("kill while idle", "kill", "idle", 1, "peer_lost"),
    Fault("kill in compilation", "kill", "compile", 1, "peer_lost"),
    Fault("kill the coordinator", "kill", "mid-step", 0, "peer_lost"),
    Fault("damaged checkpoint", "damage", "start", 0, "checkpoint_damaged", ends=False, resumes=True),
    Fault("preempt one", "terminate", "step", 1, "preempted"),
    _ORDERLY,
    Fault("stopped process", "stop", "mid-step", 1, "peer_lost"),
    Fault("exception in a step", "raise", "step", 1, "peer_lost"),
    Fault("exception in prefetch", "raise", "prefetch", 1, "peer_lost"),
    Fault("exception in a thread", "raise in a thread", "step", 0, "peer_lost"),
    Fault("exit 0", "exit", "step", 1, "peer_lost"),
    Fault("hang in reading data", "hang", "prefetch", 1, "hang"),
    Fault("cut link", "cut", "step", 1, "hang", namespace=True),
)

WITH_MORE = (
    "kill in a step", "kill in a save", "kill the coordinator", "preempt one", "hang in reading data", "cut link",
)  # fmt: skip
"""What is tried with every number of processes but the first, unless faults are named."""


def chosen(names: str | None) -> list[Fault]:
    """The faults named, separated by commas, in the order of the table; None is all.

    Raises `ConfigError` for a name that is none.
    """
    known = {fault.name: fault for fault in FAULTS}
    wanted = list(known) if names is None else [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--faults: unknown fault {name!r}; {nearest(name, list(known))}")
    return [fault for fault in FAULTS if fault.name in wanted]


def starts(faults: list[Fault]) -> list[list[Fault]]:
    """The faults of each start of the processes; the last start is one that nothing ends.

    The first two are orderly stops, where a fault needs checkpoints that no other leaves before it.
    """
    found: list[list[Fault]] = [[]]
    for fault in faults:
        if fault.resumes and len(found) == 1:
            found = [[*found[0], _ORDERLY], [_ORDERLY], []]
        if any(fault.namespace != other.namespace for other in found[-1]):
            found.append([])
        found[-1].append(fault)
        if fault.ends:
            found.append([])
    return found
