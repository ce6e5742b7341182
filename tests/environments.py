"""Variables as launchers set them, recorded from real ones: Slurm 22.05, Open MPI 4.1, torchrun of PyTorch 2.15.

Host names are shortened, and what says nothing about processes is left out.
"""

_SLURM = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NODELIST": "n[1-4]",
    "SLURM_SUBMIT_HOST": "login",
}


def _step(nodes: str, tasks: str, node: int, task: int, local: int, count: int, **more: str) -> dict[str, str]:
    return _SLURM | {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NTASKS": str(count),
        "SLURM_NPROCS": str(count),
        "SLURM_PROCID": str(task),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        "SLURM_TASKS_PER_NODE": tasks,
        **more,
    }


SLURM_TASK_A_NODE = _step(
    "n[1-2]", "1(x2)", 1, 1, 0, 2,
    CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_ON_NODE="4", SLURM_STEP_GPUS="0,1,2,3", SLURM_JOB_NUM_NODES="2",
)  # fmt: skip
SLURM_TASK_A_GPU = _step(
    "n[1-2]", "4(x2)", 1, 6, 2, 8,
    CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_GPUS_ON_NODE="4", SLURM_STEP_GPUS="0,1,2,3", SLURM_NTASKS_PER_NODE="4",
)  # fmt: skip
SLURM_GPUS_PER_TASK = _step(
    "n[1-2]", "4(x2)", 1, 7, 3, 8,
    CUDA_VISIBLE_DEVICES="3", SLURM_GPUS_ON_NODE="4", SLURM_STEP_GPUS="3", SLURMD_TRES_BIND="gpu:per_task:1",
)  # fmt: skip
SLURM_STEP_ON_SOME = _step("n[3-4]", "1(x2)", 1, 1, 0, 2, SLURM_DISTRIBUTION="cyclic", HOSTNAME="n1")
SLURM_UNEVEN = _step("gpu[001-003,007]", "2(x3),1", 2, 5, 1, 7)
SLURM_REQUEUED = _step("n[1-2]", "1(x2)", 1, 1, 0, 2, SLURM_RESTART_COUNT="1", SLURM_JOB_NUM_NODES="2")
SLURM_ONE_TASK = _step("n3", "1", 0, 0, 0, 1, SLURM_NNODES="1")
SLURM_ONE_NODE = _step("n3", "2", 0, 1, 1, 2)
SLURM_SALLOC_SHELL = _SLURM | {"SLURM_JOB_NAME": "interactive", "SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "1(x4)"}
SLURM_BATCH_SCRIPT = _SLURM | {
    "SLURM_NTASKS": "2",
    "SLURM_NPROCS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NUM_NODES": "2",
}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "261423104.0;tcp://192.0.2.2:37569;tcp6://[fd00::2]:45577",
    "OMPI_UNIVERSE_SIZE": "4",
}

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "MASTER_ADDR": "gpu7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

INDEXED_JOB = {"JOB_COMPLETION_INDEX": "2", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "run-2"}
