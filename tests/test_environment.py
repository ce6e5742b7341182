"""Which process this is, from everything that starts processes."""

import os
import subprocess

import environments as env
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmnt.config.schema import Cluster
from jaxmnt.distributed.hostlist import expand_counts, expand_hostlist
from jaxmnt.distributed.identity import Identity, survey
from jaxmnt.distributed.launchers import Machine
from jaxmnt.errors import ConfigError

NAMES = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
PLAIN = Machine("box", "")
POD = Machine("run-2", "run.default.svc.cluster.local")
JOBSET_POD = Machine("run-workers-0-2", "run.default.svc.cluster.local")
SECOND_JOB = Machine("run-workers-1-2", "run.default.svc.cluster.local")
SOME_JOB = env.INDEXED_JOB | {
    "JOB_GLOBAL_INDEX": "1",
    "PROCESSES_IN_JOB": "4",
    "JAX_NUM_PROCESSES": "8",
    "JAX_COORDINATOR_ADDRESS": "run-workers-0-0.run:12355",
}


def place(environment, cluster=None, machine=PLAIN, gpus=0):
    return survey(cluster or Cluster(), environment, machine, gpus).identity


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({}, Identity()),
        (NAMES, Identity(2, 4, "h:1")),
        (env.SLURM_TASK_A_NODE, Identity(1, 2, "n1:61445")),
        (env.SLURM_TASK_A_GPU, Identity(6, 8, "n1:61445", (2,))),
        (env.SLURM_GPUS_PER_TASK, Identity(7, 8, "n1:61445")),
        (env.SLURM_STEP_ON_SOME, Identity(1, 2, "n3:61445")),
        (env.SLURM_UNEVEN, Identity(5, 7, "gpu001:61445")),
        (env.SLURM_REQUEUED, Identity(1, 2, "n1:61445")),
        (env.SLURM_ONE_NODE, Identity(1, 2, "127.0.0.1:61445")),
        (env.SLURM_TASK_A_NODE | {"SLURM_STEP_ID": "3"}, Identity(1, 2, "n1:62972")),
        (env.SLURM_TASK_A_NODE | {"RANK": "0"}, Identity(1, 2, "n1:61445")),
        (env.SLURM_ONE_TASK, Identity()),
        (env.OPEN_MPI, Identity(3, 4, "192.0.2.2:64533")),
        (env.OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Identity(3, 4, "127.0.0.1:64533")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, Identity(1, 2, "127.0.0.1:12355")),
        (env.TORCHRUN, Identity(5, 8, "gpu7:29501")),
        (env.TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": ""}, Identity(5, 8, "gpu7:29500")),
        (env.TORCHRUN | {"MASTER_ADDR": "fd00::2"}, Identity(5, 8, "[fd00::2]:29501")),
        (env.TORCHRUN | {"MASTER_ADDR": "[::1]"}, Identity(5, 8, "[::1]:29501")),
        (env.TORCHRUN | {"MASTER_ADDR": " gpu7. "}, Identity(5, 8, "gpu7.:29501")),
        (env.TORCHRUN | {"MASTER_ADDR": "fe80::1%eth0"}, Identity(5, 8, "[fe80::1%eth0]:29501")),
        (env.OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fd00::2]:4000"}, Identity(3, 4, "[fd00::2]:65463")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Identity()),
        ({"RANK": "0"}, Identity()),
        ({"MASTER_ADDR": "left-over", "MASTER_PORT": "1"}, Identity()),
        (NAMES | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, Identity()),
        ({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, Identity()),
    ],
)
def test_each_launcher_is_understood(environment, identity):
    assert place(environment) == identity


def test_a_requeue_is_among_what_is_shown():
    assert survey(Cluster(), env.SLURM_REQUEUED, PLAIN, 0).values_read["SLURM_RESTART_COUNT"] == "1"


@pytest.mark.parametrize(
    ("environment", "machine", "identity"),
    [
        (
            env.INDEXED_JOB | {"JAX_NUM_PROCESSES": "4"},
            POD,
            Identity(2, 4, "run-0.run.default.svc.cluster.local:12355"),
        ),
        (
            env.INDEXED_JOB | {"JAX_NUM_PROCESSES": "4"},
            JOBSET_POD,
            Identity(2, 4, "run-workers-0-0.run.default.svc.cluster.local:12355"),
        ),
        (SOME_JOB, SECOND_JOB, Identity(6, 8, "run-workers-0-0.run:12355")),
    ],
)
def test_pods_know_their_place_from_their_name(environment, machine, identity):
    assert place(environment, machine=machine) == identity


@pytest.mark.parametrize(
    ("environment", "gpus", "devices"),
    [
        (env.SLURM_TASK_A_NODE, 4, None),
        (env.SLURM_TASK_A_GPU, 4, (2,)),
        (env.SLURM_GPUS_PER_TASK, 4, None),
        (env.SLURM_ONE_NODE, 8, (4, 5, 6, 7)),
        (env.SLURM_ONE_NODE | {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 8, None),
        (env.TORCHRUN, 4, (1,)),
        (env.TORCHRUN | {"CUDA_VISIBLE_DEVICES": "3"}, 4, None),
        (env.TORCHRUN | {"JAX_PLATFORMS": "cpu"}, 4, None),
        (env.TORCHRUN | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 8, (1,)),
        (env.TORCHRUN | {"CUDA_VISIBLE_DEVICES": "-1"}, 8, None),
        (env.TORCHRUN | {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, 8, None),
        (env.OPEN_MPI, 0, None),
        ({}, 8, None),
    ],
)
def test_each_process_has_its_share_of_the_gpus(environment, gpus, devices):
    assert place(environment, gpus=gpus).local_devices == devices
    assert place(environment, Cluster(local_devices=[7]), gpus=gpus).local_devices == (7,)


@pytest.mark.parametrize(
    ("cluster", "identity"),
    [
        (Cluster(coordinator="fast-n1:9000"), Identity(1, 2, "fast-n1:9000")),
        (Cluster(processes=2), Identity(1, 2, "n1:61445")),
        (Cluster(launcher="slurm"), Identity(1, 2, "n1:61445")),
        (Cluster(launcher="torchrun"), Identity(5, 8, "gpu7:29501", (1,))),
        (Cluster(launcher="explicit"), Identity()),
        (Cluster(launcher="explicit", processes=3, process_id=2, coordinator="h:1"), Identity(2, 3, "h:1")),
    ],
)
def test_the_config_chooses_and_completes(cluster, identity):
    environment = env.SLURM_TASK_A_NODE | (env.TORCHRUN if cluster.launcher != "auto" else {})
    assert place(environment, cluster) == identity


ANYTHING = Cluster()


@pytest.mark.parametrize(
    ("cluster", "environment", "words"),
    [
        (Cluster(processes=4), {}, r"process_id: missing"),
        (Cluster(processes=4, process_id=4, coordinator="h:1"), {}, r"out of range"),
        (Cluster(processes=4, process_id=1), {}, r"coordinator: missing"),
        (Cluster(processes=4, process_id=1, coordinator="host"), {}, r"not HOST:PORT"),
        (Cluster(process_id=1), {}, r"processes: missing"),
        (Cluster(coordinator="h:1"), {}, r"processes: missing"),
        (Cluster(processes=1, process_id=1), {}, r"out of range for 1"),
        (Cluster(launcher="slurm"), {}, r"cluster.launcher: slurm is set, but none of its environment variables are"),
        (ANYTHING, NAMES | {"JAX_PROCESS_ID": "two"}, r"JAX_PROCESS_ID: 'two'"),
        (
            ANYTHING,
            env.SLURM_SALLOC_SHELL,
            r"job 5 with 4 tasks or nodes, but srun did not start it; start it with srun",
        ),
        (ANYTHING, env.SLURM_BATCH_SCRIPT, r"job 5 with 2 tasks"),
        (ANYTHING, {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "8"}, r"with 8 tasks"),
        (ANYTHING, env.SLURM_ONE_TASK | {"SLURM_NNODES": "4"}, r"with 4 tasks or nodes, but srun did not start it"),
        (ANYTHING, env.SLURM_SALLOC_SHELL | {"RANK": "0", "WORLD_SIZE": "1"}, r"but srun did not start it"),
        (ANYTHING, env.SLURM_SALLOC_SHELL | {"SLURM_STEP_ID": "4294967290"}, r"but srun did not start it"),
        (ANYTHING, env.SLURM_TASK_A_NODE | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, r"contradict each other"),
        (ANYTHING, env.SLURM_TASK_A_NODE | {"SLURM_STEP_NODELIST": "n[1-"}, r"SLURM_STEP_NODELIST: 'n\[1-'"),
        (ANYTHING, env.SLURM_TASK_A_NODE | {"SLURM_PROCID": ""}, r"SLURM_PROCID: missing"),
        (ANYTHING, env.SLURM_TASK_A_NODE | {"SLURM_HET_SIZE": "2"}, r"heterogeneous"),
        (
            ANYTHING,
            env.TORCHRUN | {"MASTER_ADDR": "h:1"},
            r"MASTER_ADDR: 'h:1' has a port .* MASTER_ADDR=h MASTER_PORT=1",
        ),
        (ANYTHING, env.TORCHRUN | {"MASTER_ADDR": "[::1]:9"}, r"has a port in it; set MASTER_ADDR=::1 MASTER_PORT=9"),
        (ANYTHING, env.TORCHRUN | {"MASTER_ADDR": "[::1"}, r"MASTER_ADDR: '\[::1' must be the name or the address"),
        (ANYTHING, env.TORCHRUN | {"MASTER_ADDR": "a b"}, r"MASTER_ADDR: 'a b' must be the name or the address"),
        (Cluster(processes=2, process_id=0, coordinator="::1"), {}, r"coordinator: '::1' is not HOST:PORT"),
        (Cluster(processes=2, process_id=0, coordinator="[[::1]]:1"), {}, r"coordinator: '\[\[::1\]\]:1' is not"),
        (Cluster(processes=2, process_id=0, coordinator="h:1:2"), {}, r"coordinator: 'h:1:2' is not HOST:PORT"),
        (ANYTHING, {"RANK": "3"}, r"RANK and WORLD_SIZE belong together"),
        (ANYTHING, {"WORLD_SIZE": "8"}, r"RANK and WORLD_SIZE belong together"),
        (ANYTHING, {"RANK": "8", "WORLD_SIZE": "8", "MASTER_ADDR": "h"}, r"out of range"),
        (ANYTHING, {"RANK": "1", "WORLD_SIZE": "8"}, r"coordinator: missing, with 8 processes"),
        (ANYTHING, {"RANK": "-1", "WORLD_SIZE": "8"}, r"RANK: '-1' is not a number"),
        (ANYTHING, {"PMIX_RANK": "0"}, r"processes: missing"),
        (ANYTHING, {"PMI_RANK": "1", "PMI_SIZE": "2"}, r"coordinator: missing"),
        (ANYTHING, env.INDEXED_JOB, r"processes: missing"),
        (ANYTHING, env.TORCHRUN | env.SLURM_TASK_A_NODE, r"slurm says 2 .*torchrun says 8"),
        (Cluster(processes=1), env.SLURM_TASK_A_NODE, r"explicit says 1 .*slurm says 2"),
        (Cluster(processes=2, process_id=0), env.SLURM_TASK_A_NODE, r"says 0 .*slurm says 1"),
    ],
)
def test_what_is_incomplete_or_contradicts_itself_is_refused(cluster, environment, words):
    with pytest.raises(ConfigError, match=words):
        place(environment, cluster)


@pytest.mark.parametrize(
    ("environment", "machine", "words"),
    [
        (env.INDEXED_JOB | {"JAX_NUM_PROCESSES": "4"}, PLAIN, r"coordinator: missing"),
        (env.INDEXED_JOB | {"JAX_NUM_PROCESSES": "4"}, SECOND_JOB, r"one of several jobs of a JobSet"),
        (env.INDEXED_JOB | {"JAX_NUM_PROCESSES": "2"}, POD, r"out of range for 2"),
        (
            env.INDEXED_JOB | {"JOB_COMPLETION_INDEX": "4", "JOB_GLOBAL_INDEX": "0", "PROCESSES_IN_JOB": "4"},
            POD,
            r"JOB_COMPLETION_INDEX: 4 is beyond the 4 pods of its job",
        ),
        (env.INDEXED_JOB | {"JOB_COMPLETION_INDEX": "-1"}, POD, r"JOB_COMPLETION_INDEX: '-1' is not a number"),
        (env.INDEXED_JOB | {"JOB_COMPLETION_INDEX": ""}, POD, r"JOB_COMPLETION_INDEX: missing"),
        (env.INDEXED_JOB | {"JOB_COMPLETION_INDEX": "x"}, POD, r"JOB_COMPLETION_INDEX: 'x' is not a number"),
    ],
)
def test_pods_that_cannot_know_their_place(environment, machine, words):
    with pytest.raises(ConfigError, match=words):
        place(environment, machine=machine)


def test_gpus_that_cannot_be_shared_out():
    with pytest.raises(ConfigError, match="4 processes on this host see the same 6 GPUs"):
        place(env.TORCHRUN, gpus=6)
    with pytest.raises(ConfigError, match="see the same 1 GPU,"):
        place(env.TORCHRUN, gpus=1)


def test_a_survey_says_where_it_looked():
    found = survey(Cluster(), env.SLURM_TASK_A_NODE | {"RANK": "0"} | {"WORLD_SIZE": ""}, PLAIN, 4)
    assert found.source == "slurm" and found.values_read["SLURM_PROCID"] == "1"
    assert found.ignored_launchers == {"torchrun": "does not say which process this is (RANK=0)"}
    found = survey(Cluster(launcher="slurm"), env.SLURM_TASK_A_NODE | env.TORCHRUN, PLAIN, 4)
    assert found.ignored_launchers["torchrun"].startswith("another launcher was chosen (RANK=5")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n3", ["n1", "n3"]),
        ("gpu[001-003,007]", ["gpu001", "gpu002", "gpu003", "gpu007"]),
        ("a[1-2]b[08-09],c-1.example.com", ["a1b08", "a1b09", "a2b08", "a2b09", "c-1.example.com"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
    ],
)
def test_hostlists(text, names):
    assert expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["", "n[", "n[1-", "n]1[", "n[3-1]", "n[a]", "n1,", "n[1-99999999]", "n[[1]]"])
def test_what_is_no_hostlist(text):
    with pytest.raises(ValueError, match="is no"):
        expand_hostlist(text)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=20), st.integers(1, 5))
def test_hosts_written_out_and_short_are_the_same(numbers, width):
    short = f"n[{','.join(str(number).zfill(width) for number in numbers)}]"
    assert expand_hostlist(short) == [f"n{number:0{width}d}" for number in numbers]


def test_numbers_a_host():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1] and expand_counts("4") == [4]
    for text in ("", "2(x", "x", "2(3)"):
        with pytest.raises(ValueError, match="not a list of numbers"):
            expand_counts(text)


def test_huge_pages_are_asked_for_where_there_are_some(tmp_path, monkeypatch):
    from jaxmnt.distributed import malloc as module

    offered = tmp_path / "enabled"
    monkeypatch.setattr(module, "_KERNEL_SETTING", offered)
    assert module.huge_pages({}) == {}, "no such file"
    offered.write_text("always madvise [never]\n")
    assert module.huge_pages({}) == {}
    offered.write_text("always [madvise] never\n")
    assert module.huge_pages({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert module.huge_pages({"GLIBC_TUNABLES": "a=1"}) == {"GLIBC_TUNABLES": "a=1:glibc.malloc.hugetlb=1"}
    assert module.huge_pages({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}) == {}, "somebody has decided"


@pytest.mark.parametrize(
    ("platforms", "gpus", "has_driver", "devices", "wanted"),
    [
        (None, 0, False, None, True),
        (None, 1, True, None, False),
        (None, 0, True, None, False),
        ("cpu", 1, True, None, True),
        ("cuda,cpu", 0, False, None, False),
        (None, 1, True, 2, True),
    ],
)
def test_launch_local_asks_for_huge_pages_wherever_its_processes_will_be_on_cpus(
    monkeypatch, platforms, gpus, has_driver, devices, wanted
):
    from jaxmnt.distributed import local_gpus
    from jaxmnt.launch import local

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(local_gpus, "gpus_here", lambda: gpus)
    monkeypatch.setattr(local_gpus, "_has_driver", lambda: has_driver)
    monkeypatch.setattr(local, "huge_pages", lambda environment: {"HUGE": "1"})
    assert ("HUGE" in local._environment(0, 2, "a:1", devices)) == wanted


def test_processes_of_a_cpu_share_its_cores():
    from jaxmnt.launch.local import _bind_to_cores

    cores = sorted(os.sched_getaffinity(0))
    with subprocess.Popen(["sleep", "60"]) as process:
        _bind_to_cores(process.pid, 0, len(cores) + 1)
        assert os.sched_getaffinity(process.pid) == set(cores), "there are too few to share"
        _bind_to_cores(process.pid, 0, 1, 1)
        assert os.sched_getaffinity(process.pid) == {cores[0]}  # one of its own, though there are others
        _bind_to_cores(process.pid, len(cores) - 1, len(cores))
        assert os.sched_getaffinity(process.pid) == {cores[-1]}
        process.kill()
