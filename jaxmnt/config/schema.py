"""Every setting with its type, default, one-line help, and the effect of a change on resume.

This module does not access devices or files: a config can be parsed, printed and compared on any machine.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxmnt.config.clusters import Gke, Launch, Slurm
from jaxmnt.config.data import Data, check_data
from jaxmnt.config.mesh import Mesh, Pipeline, check_pipeline, complete_mesh
from jaxmnt.config.model import Model, complete_model
from jaxmnt.config.section import Section, breaking_key, key, maths_key
from jaxmnt.storage import path_problem

CLUSTER_SECTIONS = {"cluster", "launch", "slurm", "gke"}
"""Sections that describe where a run executes. They are not stored with the run and may change freely."""

Minutes = Annotated[float, Field(gt=0)]


class Run(Section):
    dir: str | None = key(None, "Run directory; default runs/<config file's name>.", path=True)
    init_from: str | None = key(
        None,
        "Start with the parameters of RUN, RUN@STEP, RUN@best or hf:FOLDER (of Hugging Face), and nothing else.",
        path=True,
    )
    fork_from: str | None = key(
        None, "Start as a branch of RUN, RUN@STEP or RUN@best, with its whole state and step.", path=True
    )
    init_from_changes: list[str] = key(
        [], "Settings of the model, and tokenizer, that differ on purpose from what init_from or fork_from names."
    )
    max_minutes: float | None = key(
        None, "Stop, with a checkpoint and exit code 75, before this start has run for this many minutes.", gt=0
    )
    stop_margin_seconds: float = key(
        120.0, "How long before max_minutes, or the end of a Slurm allocation, to stop.", ge=0
    )
    budget: float | None = key(
        None,
        "Most that all starts of the run may cost, by launch.cost_per_gpu_hour; it then stops with a checkpoint.",
        gt=0,
    )
    notify: list[str] = key(
        [], "Program and its arguments, run with an event as JSON on its standard input when the run fails, a process "
            "holds the others up, or the loss jumps.",
    )  # fmt: skip
    compile_cache: str | None = key(
        None,
        "Folder that keeps compiled programs for the next start, private to its owner; default on GPUs "
        "run.dir/compiled, on CPUs in the user's cache and only programs of one device.",
        path=True,
    )

    @model_validator(mode="after")
    def _check_max_minutes(self) -> Self:
        if self.max_minutes is not None and 60 * self.max_minutes <= self.stop_margin_seconds:
            raise ValueError(
                f"run.max_minutes: {self.max_minutes:g} minutes must be longer than run.stop_margin_seconds "
                f"({self.stop_margin_seconds:g} s), or each start stops before its first step; raise "
                "run.max_minutes or lower run.stop_margin_seconds"
            )
        return self


class Train(Section):
    steps: int = maths_key(1000, "Optimizer steps of the whole run; schedules follow it.", ge=1)
    microbatch_size: int | None = key(
        None, "Rows of a batch shard in one microbatch; default all of them, without accumulation.", ge=1
    )
    precision: Literal["auto", "float32", "bfloat16", "float8"] = maths_key(
        "auto", "Compute precision; auto is bfloat16 on GPU and float32 on CPU. float8 is bfloat16 with attention's "
        "projections and the MLP in float8. Parameters are float32.",
    )  # fmt: skip
    float8_least: int = maths_key(
        1024, "Products with fewer inputs or outputs than this on a device stay in bfloat16.", ge=16
    )
    float8_gather: bool = key(
        True, "With float8 and mesh.zero 3, gather the weights that are multiplied in float8 in float8."
    )
    params_dtype: Literal["float32", "bfloat16"] = breaking_key(
        "float32", "Dtype of the stored (master) parameters; bfloat16 loses small updates."
    )
    reduce_dtype: Literal["float32", "bfloat16"] = maths_key(
        "float32", "Dtype in which gradients are reduced over devices."
    )
    remat: Literal["none", "attention", "dots", "names", "full"] = key(
        "none", "What the backward pass recomputes: nothing but attention's scores (none, attention), all but matrix "
        "products and attention (dots), all but remat_save (names), or whole layers (full).",
    )  # fmt: skip
    remat_save: list[str] = key([], "Activations that remat names keeps, such as attention, mlp_gate, mlp_up.")
    remat_offload: list[str] = key(
        [], "Activations that remat dots, names and full keep in host memory until backward, such as layer_input."
    )
    log_every: int | None = key(
        None, "Steps between two lines if the output is not a terminal; default: a line every 10 seconds.", ge=1
    )
    layer_unroll: int = key(1, "Layers per iteration of the layer scan; faster on CPU, longer to compile.", ge=1)
    loss_chunk_mib: int = key(256, "Largest float32 logits of one loss chunk on a device, in MiB.", ge=1)
    loss: str | None = maths_key(None, "Dotted path of a function to minimise (docs/models.md); default cross-entropy.")
    z_loss: float = maths_key(0.0, "Weight of the squared log-partition penalty on the logits.", ge=0)
    eval_every: int = key(0, "Steps between evaluations; 0: only at the end.", ge=0)
    eval_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = key(
        "auto", "Held-out tokens per evaluation, in rows evenly spaced over each source; auto: 5 % of the tokens "
        "trained between two evaluations, or all if eval_every is 0; null: all.",
    )  # fmt: skip
    max_bad_steps: int = key(
        10,
        "Steps in a row that may have an infinite or NaN loss or gradient before the run ends; they change nothing.",
        ge=0,
    )
    compare_replicas_every: int = key(
        0, "Steps between comparisons of the replicas, to find devices that compute wrongly; 0: never.",
        ge=0,
    )  # fmt: skip
    stop_after: int | None = key(None, "Stop with a checkpoint and exit code 75 after this step.", ge=1)


class OptimizerRule(Section):
    pattern: str = breaking_key(..., "Names of parameters, such as layers.mlp.*; * matches any text.")
    kind: Literal["adamw", "muon"] | None = breaking_key(None, "Optimizer of these parameters; default adamw.")
    weight_decay: float | None = breaking_key(None, "Their decay; default that of the section.", ge=0)
    learning_rate_factor: float | None = breaking_key(None, "Multiplies their learning rate.", ge=0)


class Optimizer(Section):
    learning_rate: float = maths_key(3e-4, "Peak learning rate.", gt=0)
    warmup_steps: int = maths_key(0, "Steps of linear warm-up.", ge=0)
    schedule: Literal["cosine", "wsd", "constant"] = maths_key(
        "cosine", "After warm-up: cosine to the end, warm-up-stable-decay, or constant."
    )
    final_fraction: float = maths_key(0.1, "Learning rate at the end, as a share of the peak.", ge=0, le=1)
    decay_fraction: float = maths_key(0.2, "Share of the steps that wsd decays over.", gt=0, le=1)
    weight_decay: float = maths_key(0.1, "Decoupled weight decay; norms are not decayed.", ge=0)
    beta1: float = maths_key(0.9, "AdamW's decay of the first moment.", ge=0, lt=1)
    beta2: float = maths_key(0.95, "AdamW's decay of the second moment.", ge=0, lt=1)
    epsilon: float = maths_key(1e-8, "AdamW's term in the denominator.", gt=0)
    state_dtype: Literal["float32", "bfloat16"] = breaking_key("float32", "Dtype in which AdamW's moments are stored.")
    rules: list[OptimizerRule] = breaking_key(
        [], "Other settings for some parameters; the first rule that matches applies."
    )
    frozen: list[str] = breaking_key(
        [], "Names of parameters that do not train, such as embedding.*; * matches any text."
    )
    offload: bool = key(False, "Keep AdamW's moments in host memory, where the devices can.")
    clip_norm: float | None = maths_key(1.0, "Largest global norm of the gradient; null turns it off.", gt=0)


class Checkpoint(Section):
    dir: str | None = key(
        None, "Where checkpoints, the run's id and its lock are stored: a folder or gs://BUCKET/PATH; default run.dir.",
        path=True,
    )  # fmt: skip
    every_steps: int = key(500, "Steps between saves, besides the one at the end; 0: only at the end.", ge=0)
    every_minutes: Minutes | Literal["auto"] | None = key(
        None, "Also save when this many minutes have passed; auto weighs a save's cost against failures (Young–Daly)."
    )
    hours_between_failures: float | None = key(
        None,
        "For auto: mean of the whole run; default as observed in the run, else from published failures of GPUs.",
        gt=0,
    )
    keep: int = key(3, "Newest checkpoints to keep.", ge=2)
    keep_every_steps: int = key(0, "Also keep checkpoints whose step is a multiple of this; 0: none.", ge=0)
    keep_best: int = key(
        0, "Also keep this many of the evaluated checkpoints, those with the lowest held-out loss.", ge=0
    )
    verify: bool = key(True, "Compare what is restored with the digests taken when it was saved.")
    read: Literal["auto", "each", "spread"] = key(
        "auto", "How replicas of the model read: each all of it, or spread, a share of it and the rest from the "
                "others; auto is spread with several processes on GPUs, else each.",
    )  # fmt: skip
    max_failed_saves: int = key(3, "Saves in a row that may fail before the run stops.", ge=1)


class Watchdog(Section):
    step_seconds: float | None = key(
        45.0, "Longest time of a step before the run counts as hanging; null disables the check.", gt=0
    )
    factor: float = key(10.0, "Or this many times the median step, whichever is longer.", ge=1)
    first_step_seconds: float | None = key(
        900.0, "Limit for the first step, which opens connections; null: no limit.", gt=0
    )
    compile_seconds: float | None = key(7200.0, "Limit for compiling.", gt=0)
    restore_seconds: float | None = key(
        3600.0, "Limit for restoring a checkpoint, and for waiting for data at the start.", gt=0
    )
    evaluate_seconds: float | None = key(900.0, "Limit for a batch of an evaluation.", gt=0)
    save_seconds: float | None = key(
        3600.0, "Limit for the part of a save that blocks training, and for the whole last save.", gt=0
    )


class Telemetry(Section):
    flops: Literal["causal", "square", "parameters", "levanter"] = key(
        "causal", "What MFU counts: weights that multiply and attention over the keys that a token sees, or over the "
                  "square of the length, or that and every parameter, or as Levanter.",
    )  # fmt: skip
    phases: bool = key(True, "Report the time of each phase of a step (phases.jsonl), which identifies stragglers.")
    resources_every_seconds: float | None = key(
        30.0, "Seconds between two readings of memory, GPUs and network (resources.jsonl); null: none.", ge=0.1
    )
    probe_every: int = key(
        1000,
        "Steps between two matrix products that each device times by itself, to find slow devices; 0: never.",
        ge=0,
    )
    noise_scale: bool = key(False, "Also measure the gradient noise scale, which indicates the largest useful batch.")
    profile_at: int | None = key(
        None, "Step from which one step is profiled, after a checkpoint, on one device of process 0.", ge=1
    )
    samples: list[str] = key([], "Prompts that are continued after each evaluation, for the events and the report.")
    sample_tokens: int = key(64, "Tokens that are generated for each sample.", ge=1)
    sinks: list[str] | None = key(
        None, "Additional sinks for metrics: tensorboard, wandb, trackio, mlflow, dotted paths of classes of your own; "
              "default tensorboard if it is installed.",
    )  # fmt: skip
    project: str = key("jaxmnt", "Project or experiment in which wandb, trackio and mlflow keep the run.", min_length=1)
    port: int | None = key(
        None, "Port on which process 0 answers /metrics (Prometheus), /status, /healthz and /stacks; 0: any free one.",
        ge=0, le=65535,
    )  # fmt: skip
    host: str = key("127.0.0.1", "Address for telemetry.port; by default only this host can ask.")


class Cluster(Section):
    coordinator: str | None = key(None, "HOST:PORT of process 0; default JAX_COORDINATOR_ADDRESS, then the launcher's.")
    processes: int | None = key(None, "Processes in all; default JAX_NUM_PROCESSES, then the launcher's, else 1.", ge=1)
    process_id: int | None = key(None, "This process, from 0; default JAX_PROCESS_ID, then the launcher's.", ge=0)
    launcher: Literal["auto", "explicit", "slurm", "kubernetes", "mpi", "torchrun"] = key(
        "auto", "Launcher whose variables identify this process; explicit uses only JAX's own."
    )
    local_devices: list[Annotated[int, Field(ge=0)]] | None = key(
        None, "GPUs of this process, by index among those that it sees; default its share of them."
    )
    start_timeout_seconds: float = key(300.0, "How long to wait for all processes at the start.", gt=0)
    silence_timeout_seconds: float = key(
        30.0, "A process that is silent for this long is given up, once it has finished a step.", ge=5
    )
    heartbeat_timeout_seconds: int = key(
        100, ("JAX's own limit for a silent process, at which JAX aborts the others. Before the first step, ours "
             "is 90 % of it."),
        ge=2,
    )  # fmt: skip

    nccl_timeout_seconds: int | None = key(
        None, "How long a collective may stall on GPUs before NCCL ends the process; default 300 s more than the "
        "watchdog's longest limit for a step, an evaluation or a save.",
        ge=1,
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_silence_timeout(self) -> Self:
        if self.silence_timeout_seconds >= self.heartbeat_timeout_seconds:
            raise ValueError(
                f"cluster.silence_timeout_seconds: {self.silence_timeout_seconds:g} must be below "
                f"cluster.heartbeat_timeout_seconds ({self.heartbeat_timeout_seconds}), at which JAX aborts "
                "without naming a process; lower it, or raise cluster.heartbeat_timeout_seconds"
            )
        return self


class Config(Section):
    """The whole config. Cross-key rules that need no device are checked here; the rest in
    `training.build.build_spec`."""

    seed: int = breaking_key(0, "Seed of initialisation, data order and dropout.", ge=0, lt=2**31)
    run: Run = Run()
    train: Train = Train()
    data: Data = Data()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    checkpoint: Checkpoint = Checkpoint()
    mesh: Mesh = Mesh()
    pipeline: Pipeline = Pipeline()
    watchdog: Watchdog = Watchdog()
    telemetry: Telemetry = Telemetry()
    cluster: Cluster = Cluster()
    launch: Launch = Launch()
    slurm: Slurm = Slurm()
    gke: Gke = Gke()

    @model_validator(mode="before")
    @classmethod
    def _fill_empty_sections(cls, raw: Any) -> Any:
        """Replaces empty sections (null in YAML) by their defaults."""
        if not isinstance(raw, dict):
            return raw
        return {name: ({} if value is None and name != "seed" else value) for name, value in raw.items()}

    @model_validator(mode="after")
    def _check_and_complete(self) -> Self:
        if self.run.dir and "://" in self.run.dir:
            raise ValueError(
                f"run.dir: {self.run.dir} must be a folder, since files in it grow; set checkpoint.dir to the address"
            )
        if self.checkpoint.dir and (trouble := path_problem(self.checkpoint.dir)):
            raise ValueError(f"checkpoint.dir: {self.checkpoint.dir} {trouble}")
        if self.run.init_from and self.run.fork_from:
            raise ValueError("run.init_from: run.fork_from is also set; remove one of them")
        if self.run.init_from_changes and not (self.run.init_from or self.run.fork_from):
            raise ValueError("run.init_from_changes: neither run.init_from nor run.fork_from is set; remove it")
        warmup, steps = self.optimizer.warmup_steps, self.train.steps
        if warmup >= steps:
            raise ValueError(
                f"optimizer.warmup_steps: {warmup} must be below train.steps ({steps}); lower it or raise train.steps"
            )
        limit, timeout = self._longest_wait_seconds, self.cluster.nccl_timeout_seconds
        if timeout is not None and timeout <= limit:
            raise ValueError(
                f"cluster.nccl_timeout_seconds: {timeout} must be above the watchdog's longest limit ({limit:g} s), or "
                "NCCL ends processes before the watchdog names one; raise it, or leave it out"
            )
        check_data(self.data)
        check_pipeline(self.pipeline, self.mesh.pipeline, self.model.num_layers)
        return self.model_copy(update={"model": complete_model(self.model), "mesh": complete_mesh(self.mesh)})

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """Returns the config with the values of these dotted keys replaced. Nothing is checked; contradictions surface
        when a step is built from the config."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            section, _, field = name.partition(".")
            sections.setdefault(section, {})[field] = value
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )

    @property
    def eval_limit(self) -> int | None:
        """Held-out tokens per evaluation by `train.eval_tokens`; None for all. Depends on the config alone."""
        train = self.train
        if train.eval_tokens != "auto":
            return train.eval_tokens
        between = train.eval_every * self.data.global_batch_size * self.data.sequence_length
        return -(-between // 20) or None

    @property
    def run_dir(self) -> Path:
        """The run directory. Every config from `load_config` has one."""
        assert self.run.dir is not None
        return Path(self.run.dir)

    @property
    def nccl_timeout_seconds(self) -> float:
        """Seconds a collective may stall before NCCL ends the process, always more than the watchdog allows."""
        return self.cluster.nccl_timeout_seconds or self._longest_wait_seconds + 300

    @property
    def _longest_wait_seconds(self) -> float:
        """Seconds the watchdog lets a process wait in a collective for others, which may be evaluating or saving."""
        watchdog = self.watchdog
        limits = (
            watchdog.step_seconds,
            watchdog.first_step_seconds,
            watchdog.evaluate_seconds,
            watchdog.save_seconds,
        )
        return max((limit for limit in limits if limit is not None), default=0.0)
