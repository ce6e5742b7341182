"""Variables that lie, or that nobody could mean: one clear message that names the variable, in little memory."""

import tracemalloc

import environments as env
import pytest

from jaxmnt.config.schema import Cluster
from jaxmnt.distributed.hostlist import expand_counts, expand_hostlist
from jaxmnt.distributed.identity import survey
from jaxmnt.distributed.launchers import Machine
from jaxmnt.errors import ConfigError

PLAIN = Machine("box", "")
NAMES = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
READ = {
    "slurm": (
        env.SLURM_TASK_A_NODE | {"SLURM_HET_SIZE": "1", "SLURM_RESTART_COUNT": "1"},
        [
            "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_HET_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NODEID",
            "SLURM_LOCALID", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT",
        ],
    ),
    "torchrun": (env.TORCHRUN, ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]),
    "mpi": (env.OPEN_MPI, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    "kubernetes": (env.INDEXED_JOB, ["JOB_COMPLETION_INDEX", "JOB_GLOBAL_INDEX", "PROCESSES_IN_JOB"]),
    "jax": (NAMES, ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]),
}  # fmt: skip
CASES = [(environment, name) for environment, names in READ.values() for name in names]


def place(environment, cluster=None):
    return survey(cluster or Cluster(), environment, PLAIN, 0).identity


@pytest.mark.parametrize("text", ["77x", "²", "٣", "-1", "1.0", "1e3", "0x10", "9" * 12, "9" * 5000, "1\x1b[31m"])
@pytest.mark.parametrize(("environment", "name"), CASES, ids=lambda one: one if isinstance(one, str) else "")
def test_what_is_no_number_is_said_with_its_variable(environment, name, text):
    with pytest.raises(ConfigError, match=rf"^{name}: ") as raised:
        place(environment | {name: text})
    assert "\x1b" not in str(raised.value) and len(str(raised.value)) < 300


NO_COORDINATORS = ("h:²", "h:99999", "h:", ":1", "h:1x", "h:-1", "h:0", "h\n:1", "h\x1b[2J:1", "h h:1", "a/b:1")


@pytest.mark.parametrize("coordinator", [*NO_COORDINATORS, "h" * 300 + ":1"])
def test_a_coordinator_that_is_none(coordinator):
    with pytest.raises(ConfigError, match=r"^cluster.coordinator: .* is not HOST:PORT") as raised:
        place(NAMES | {"JAX_COORDINATOR_ADDRESS": coordinator})
    assert "\x1b" not in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"^cluster.coordinator: .* is not HOST:PORT"):
        place({}, Cluster(processes=2, process_id=1, coordinator=coordinator))


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (NAMES | {"JAX_NUM_PROCESSES": "0", "JAX_PROCESS_ID": "0"}, r"^JAX_NUM_PROCESSES: 0 is not between 1"),
        (
            NAMES | {"JAX_NUM_PROCESSES": "4000000000"},
            r"^cluster.processes: 4000000000 is more than the maximum of 100000;",
        ),
        (env.TORCHRUN | {"LOCAL_RANK": "7"}, r"process 7 of 4 on its host is out of range"),
        (env.OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, r"process 2 of 2 on its host is out of range"),
        (env.SLURM_TASK_A_NODE | {"SLURM_STEP_TASKS_PER_NODE": "2,0"}, r"variables of Slurm contradict each other"),
    ],
)
def test_what_contradicts_itself(environment, words):
    with pytest.raises(ConfigError, match=words):
        survey(Cluster(), environment, PLAIN, 4)


def test_an_empty_variable_is_none():
    assert place({"SLURM_JOB_ID": "", "RANK": "", "PMI_RANK": ""}).alone


BOMBS = [
    "n[1-99999][1-99999]", "n[1-99999][1-99999][1-99999]", "n[1-99999],n[1-99999],n[1-99999]",
    "n[" + "0" * 100_000 + "1-99999]", "n[1-" + "9" * 5000 + "]", "n[" + "1-99999," * 1000 + "1]", "a," * 20_000 + "[",
]  # fmt: skip


@pytest.mark.parametrize("text", BOMBS, ids=range(len(BOMBS)))
def test_a_hostlist_that_would_take_gigabytes(text):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="is no") as raised:
            expand_hostlist(text)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert len(str(raised.value)) < 300


def test_long_hostlists_are_read():
    assert len(expand_hostlist("n[1-100000]")) == 100_000
    assert expand_hostlist(",".join(f"n{number}" for number in range(9000)))[-1] == "n8999"


@pytest.mark.parametrize("text", ["1(x99999),1(x99999)", "1(x" + "9" * 5000 + ")", "9" * 5000, "²(x2)", "1(x٣)"])
def test_numbers_a_host_that_would_take_gigabytes(text):
    with pytest.raises(ValueError, match="is not a list of numbers"):
        expand_counts(text)


def test_another_address_of_process_0_is_not_the_same():
    """The same rank and count, at another address: that is said, and the first in order counts."""
    other = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "29500"}
    found = survey(Cluster(), env.SLURM_TASK_A_NODE | other, PLAIN, 0)
    assert found.identity.coordinator == "n1:61445"
    assert found.ignored_launchers["torchrun"].startswith(
        "says the same, but that process 0 is at elsewhere:29500 (RANK=1"
    )
    same = other | {"MASTER_ADDR": "n1", "MASTER_PORT": "61445"}
    assert (
        survey(Cluster(), env.SLURM_TASK_A_NODE | same, PLAIN, 0)
        .ignored_launchers["torchrun"]
        .startswith("says the same (")
    )


def test_what_is_shown_of_variables_obeys_no_terminal():
    found = survey(Cluster(launcher="explicit"), {"RANK": "0", "SLURM_JOB_ID": "5", "WORLD_SIZE": "\x1b[2J"}, PLAIN, 0)
    assert "\x1b" not in str(found)
