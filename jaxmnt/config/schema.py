"""Every setting with its type, default, one-line help, and the effect of a change on resume.

This module does not access devices or files: a config can be parsed, printed and compared on any machine.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from jaxmnt.config.clusters import Gke, Launch, Slurm
from jaxmnt.config.data import Data, check_data
from jaxmnt.config.lora import Lora
from jaxmnt.config.mesh import Mesh, Pipeline, check_pipeline, complete_mesh
from jaxmnt.config.model import Model, complete_model
from jaxmnt.config.section import OwnValue, Section, breaking_key, key, maths_key
from jaxmnt.storage import path_problem

CLUSTER_SECTIONS = {"cluster", "launch", "slurm", "gke"}
"""Sections that describe where a run executes. They are not stored with the run and may be changed freely."""

Minutes = Annotated[float, Field(gt=0)]


class Run(Section):
    dir: str | None = key(None, "Run directory; default runs/<config file's name>.", path=True)
    init_from: str | None = key(
        None,
        "Start from the parameters of RUN, RUN@STEP, RUN@best or hf:FOLDER (a Hugging Face model), and nothing else.",
        path=True,
    )
    fork_from: str | None = key(
        None, "Start as a branch of RUN, RUN@STEP or RUN@best, with its full train state and its step.", path=True
    )
    init_from_changes: list[str] = key(
        [],
        "Model settings that intentionally differ from those of init_from or fork_from, such as rope_theta, or "
        "tokenizer.",
    )
    max_minutes: float | None = key(
        None, "Save a checkpoint and stop with exit code 75 before this start has run for this many minutes.", gt=0
    )
    stop_margin_seconds: float = key(
        120.0, "How long before max_minutes, or before the end of a Slurm allocation, the run stops.", ge=0
    )
    budget: float | None = key(
        None,
        "Maximum cost of all starts of the run, at launch.cost_per_gpu_hour; the run then saves a checkpoint and "
        "stops.",
        gt=0,
    )
    notify: list[str] = key(
        [], "Program to start, with its arguments, when the run fails, a process delays the others, or the loss jumps. "
            "It gets the event as JSON on its standard input.",
    )  # fmt: skip
    compile_cache: str | None = key(
        None,
        "Folder that stores compiled programs for the next start; only its owner can read it. Default on GPUs: "
        "run.dir/compiled; on CPUs: a folder in the user's cache, for single-device programs only.",
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
    steps: int = maths_key(1000, "Number of optimizer steps in the run; schedules are scaled to it.", ge=1)
    microbatch_size: int | None = key(
        None, "Rows of a batch shard per microbatch. Default: all rows, so gradients are not accumulated.", ge=1
    )
    overlap_microbatches: bool | None = key(
        None, "Run the forward pass of a microbatch beside the backward pass of another, so that one computes while "
        "the other communicates. Default: on GPUs true in pipelines and with mesh.model, unless the model has experts.",
    )  # fmt: skip
    precision: Literal["auto", "float32", "bfloat16", "float8"] = maths_key(
        "auto", "Compute precision. auto: bfloat16 on GPUs, float32 on CPUs. float8: bfloat16, except that the "
        "attention projections and the MLP use float8. params_dtype sets the dtype of the parameters.",
    )  # fmt: skip
    float8_least: int = maths_key(
        1024, "With float8: matrix products with fewer inputs or outputs than this on a device use bfloat16.", ge=16
    )
    float8_gather: bool = key(
        True, "With float8 and mesh.zero 3: convert weights of float8 matrix products to float8 before gathering them."
    )
    params_dtype: Literal["float32", "bfloat16"] = breaking_key(
        "float32", "Dtype of the stored (master) parameters; bfloat16 loses small updates."
    )
    reduce_dtype: Literal["float32", "bfloat16"] = maths_key(
        "float32", "Dtype in which gradients are reduced across devices."
    )
    remat: Literal["none", "attention", "dots", "names", "full"] = key(
        "none", "What the backward pass recomputes. none and attention: only attention scores; dots: all except matrix "
        "products and attention; names: all except the activations in remat_save; full: entire layers.",
    )  # fmt: skip
    remat_save: list[str] = key([], "With remat=names: the activations to keep, such as attention, mlp_gate, mlp_up.")
    remat_offload: list[str] = key(
        [], "With remat=dots, names or full: activations to keep in host memory until backward, such as layer_input."
    )
    log_every: int | None = key(
        None, "Steps between progress lines if the output is not a terminal. Default: a line every 10 seconds.", ge=1
    )
    layer_unroll: int = key(
        1, "Layers per iteration of the layer scan. More are faster on CPUs but compile longer.", ge=1
    )
    loss_chunk_mib: int = key(256, "Maximum size of the float32 logits of a loss chunk on a device, in MiB.", ge=1)
    loss: str | None = maths_key(None, "Dotted path of the loss function (docs/models.md). Default: cross-entropy.")
    loss_settings: dict[str, OwnValue] = maths_key({}, "Settings of a loss function of your own.")
    z_loss: float = maths_key(0.0, "Weight of the squared log-partition penalty on the logits.", ge=0)
    eval_every: int = key(0, "Steps between evaluations; 0: only at the end.", ge=0)
    eval_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = key(
        "auto", "Held-out tokens per evaluation, in rows spaced evenly over each source. auto: 5 % of the tokens that "
        "are trained between two evaluations, or all tokens if eval_every is 0; null: all tokens.",
    )  # fmt: skip
    max_bad_steps: int = key(
        10,
        "Consecutive steps that may have an infinite or NaN loss or gradient; one more ends the run. Such steps do not "
        "update the parameters.",
        ge=0,
    )
    compare_replicas_every: int = key(
        0, "Steps between comparisons of the replicas, which find devices with wrong results; 0: never.",
        ge=0,
    )  # fmt: skip
    stop_after: int | None = key(None, "Save a checkpoint after this step and stop with exit code 75.", ge=1)


class Muon(Section):
    momentum: float = maths_key(0.95, "Decay rate of the momentum.", ge=0, lt=1)
    scale: Literal["rms", "spectral", "none"] = maths_key(
        "rms", "Factor of an update. rms: 0.2 sqrt(max(inputs, outputs)), with which AdamW's learning rate and decay "
        "serve both; spectral: sqrt(max(1, outputs / inputs)); none: 1.",
    )  # fmt: skip
    coefficients: Literal["jordan", "polar_express"] = maths_key(
        "jordan", "Coefficients of the Newton–Schulz iteration. Those of polar_express differ from step to step, and "
        "their results are closer to orthogonal.",
    )  # fmt: skip
    steps: int = maths_key(5, "Steps of the Newton–Schulz iteration.", ge=1, le=20)


class Average(Section):
    decay: float = maths_key(0.999, "Share of the average that a step keeps.", gt=0, lt=1)
    from_step: int = maths_key(0, "Step after which the average begins, with the parameters at that step.", ge=0)


class OptimizerRule(Section):
    pattern: str = breaking_key(..., "Pattern of parameter names, such as layers.mlp.*; * matches any text.")
    kind: str | None = breaking_key(
        None, "Optimizer of these parameters: whatever optimizer.kind may be. Default: that of optimizer.kind."
    )
    arguments: dict[str, OwnValue] = breaking_key({}, "Arguments of the function that kind names.")
    weight_decay: float | None = breaking_key(
        None, "Weight decay of these parameters. Default: optimizer.weight_decay.", ge=0
    )
    learning_rate_factor: float | None = breaking_key(None, "Factor for the learning rate of these parameters.", ge=0)


class Optimizer(Section):
    kind: str = breaking_key(
        "adamw", "Optimizer. adamw; muon: Muon for the matrices of layers, and AdamW for all other parameters; or the "
        "dotted path of a function that returns an optax.GradientTransformation, such as optax.scale_by_lion.",
    )  # fmt: skip
    arguments: dict[str, OwnValue] = breaking_key({}, "Arguments of the function that kind names.")
    learning_rate: float = maths_key(3e-4, "Peak learning rate.", gt=0)
    warmup_steps: int = maths_key(0, "Steps of linear warm-up.", ge=0)
    schedule: Literal["cosine", "wsd", "constant"] = maths_key(
        "cosine",
        "Learning rate after warm-up. cosine: falls as a cosine until the end; wsd (warm-up-stable-decay): is constant "
        "until it decays at the end; constant: does not change.",
    )
    final_fraction: float = maths_key(0.1, "Learning rate at the end, as a fraction of the peak.", ge=0, le=1)
    decay_fraction: float = maths_key(0.2, "With wsd: fraction of the steps in which it decays.", gt=0, le=1)
    weight_decay: float = maths_key(0.1, "Decoupled weight decay; norms are not decayed.", ge=0)
    beta1: float = maths_key(0.9, "Decay rate of AdamW's first moment.", ge=0, lt=1)
    beta2: float = maths_key(0.95, "Decay rate of AdamW's second moment.", ge=0, lt=1)
    epsilon: float = maths_key(1e-8, "Constant in the denominator of AdamW's update.", gt=0)
    state_dtype: Literal["float32", "bfloat16"] = breaking_key(
        "float32", "Dtype in which the optimizer's state is stored."
    )
    rules: list[OptimizerRule] = breaking_key(
        [], "Settings that apply to some of the parameters; the first rule that matches a parameter applies to it."
    )
    frozen: list[str] = breaking_key(
        [], "Names of parameters that are not trained, such as embedding.*; * matches any text."
    )
    muon: Muon = key(Muon(), "Settings of Muon.")
    average: Average | None = maths_key(
        None, "Exponential moving average of the parameters, which evaluations report beside the loss of the "
        "parameters themselves. null: none.",
    )  # fmt: skip
    offload: bool = key(False, "Keep the optimizer's state in host memory, if the devices support it.")
    clip_norm: float | None = maths_key(
        1.0, "Maximum global norm; larger gradients are scaled down to it; null: no maximum.", gt=0
    )

    @model_validator(mode="after")
    def _check_kinds(self) -> Self:
        settings = {"optimizer": self} | {f"optimizer.rules.{index}": rule for index, rule in enumerate(self.rules)}
        for where, section in settings.items():
            if section.kind is None or section.kind in ("adamw", "muon"):
                if section.arguments:
                    raise ValueError(
                        f"{where}.arguments: only an optimizer that is named by a dotted path has arguments; remove it"
                    )
            elif "." not in section.kind:
                raise ValueError(
                    f"{where}.kind: {section.kind!r} is not known; set adamw or muon, or give the dotted path of a "
                    "function that returns an optax.GradientTransformation, such as optax.scale_by_lion"
                )
        return self


class Checkpoint(Section):
    dir: str | None = key(
        None, "Where checkpoints, the run's id and its lock are stored: a folder or gs://BUCKET/PATH. Default: "
        "run.dir.",
        path=True,
    )  # fmt: skip
    every_steps: int = key(500, "Steps between saves; the run also saves at the end. 0: only at the end.", ge=0)
    every_minutes: Minutes | Literal["auto"] | None = key(
        None,
        "Also save whenever this many minutes have passed. auto: the interval that balances the cost of saving against "
        "that of failures (Young–Daly).",
    )
    hours_between_failures: float | None = key(
        None,
        "For auto: mean hours between failures of the run. Default: as observed in the run, or from published failure "
        "rates of GPUs if there were none.",
        gt=0,
    )
    keep: int = key(3, "Number of newest checkpoints to keep.", ge=2)
    keep_every_steps: int = key(0, "Also keep checkpoints whose step is a multiple of this; 0: none.", ge=0)
    keep_best: int = key(0, "Also keep this many evaluated checkpoints, those with the lowest held-out loss.", ge=0)
    verify: bool = key(True, "Compare restored arrays with the digests that were taken when they were saved.")
    read: Literal["auto", "each", "spread"] = key(
        "auto", "How replicas of the model read a checkpoint. each: every replica reads all of it; spread: every "
        "replica reads a share, and gets the rest from the others; auto: spread with several processes on GPUs, else "
        "each.",
    )  # fmt: skip
    max_failed_saves: int = key(3, "Consecutive saves that may fail before the run stops.", ge=1)


class Watchdog(Section):
    step_seconds: float | None = key(
        45.0, "Maximum time of a step, after which the run counts as hanging; null disables the check.", gt=0
    )
    factor: float = key(
        10.0, "A step may take this many times the median step, even if that exceeds step_seconds.", ge=1
    )
    first_step_seconds: float | None = key(
        900.0, "Limit for the first step, which opens connections; null: no limit.", gt=0
    )
    compile_seconds: float | None = key(7200.0, "Limit for compiling.", gt=0)
    restore_seconds: float | None = key(
        3600.0, "Limit for restoring a checkpoint, and for waiting for data at the start.", gt=0
    )
    evaluate_seconds: float | None = key(900.0, "Limit for one batch of an evaluation.", gt=0)
    save_seconds: float | None = key(
        3600.0, "Limit for the part of a save that blocks training, and for all of the last save.", gt=0
    )


class Sample(Section):
    prompt: str = key(..., "Text that the model continues; with chat, a user's turn.")
    expect: str | None = key(None, "Text that the continuation should be. The model then takes the likeliest tokens.")
    chat: bool = key(False, "Format the prompt with the chat template of the data.")
    system: str | None = key(None, "System message before the prompt. Only with chat.")

    @model_validator(mode="after")
    def _check_system(self) -> "Sample":
        if self.system is not None and not self.chat:
            raise ValueError("telemetry.samples: only a conversation has a system message; set chat: true")
        return self


class Telemetry(Section):
    flops: Literal["causal", "square", "parameters", "levanter"] = key(
        "causal", "How MFU counts FLOPs. causal: weights in matrix products, and attention to the keys that a token "
        "sees; square: the same with attention to the full length; parameters: as square, but with every parameter; "
        "levanter: as Levanter counts.",
    )  # fmt: skip
    phases: bool = key(True, "Report the time of each phase of a step (phases.jsonl), which identifies stragglers.")
    resources_every_seconds: float | None = key(
        30.0, "Seconds between measurements of memory, GPUs and network (resources.jsonl); null: never.", ge=0.1
    )
    probe_every: int = key(
        1000,
        "Steps between probes, in which each device times a matrix product to find slow devices; 0: never.",
        ge=0,
    )
    noise_scale: bool = key(False, "Also measure the gradient noise scale, which indicates the largest useful batch.")
    profile_at: int | None = key(
        None, "Profile one step, from this step on and after a checkpoint, on one device of process 0.", ge=1
    )
    samples: list[str | Sample] = key(
        [], "Prompts that the model continues after each evaluation, for the events and the report. Each is a text, or "
            "an object with prompt, expect, chat and system.",
    )  # fmt: skip
    sample_tokens: int = key(64, "Number of tokens to generate for each sample.", ge=1)
    sinks: list[str] | None = key(
        None, "Additional sinks for metrics: tensorboard, wandb, trackio, mlflow, or dotted paths of your own classes. "
              "Default: tensorboard if it is installed.",
    )  # fmt: skip
    project: str = key(
        "jaxmnt", "Project or experiment in which wandb, trackio and mlflow store the run.", min_length=1
    )
    port: int | None = key(
        None, "Port on which process 0 serves /metrics (Prometheus), /status, /healthz and /stacks; 0: any free port.",
        ge=0, le=65535,
    )  # fmt: skip
    host: str = key("127.0.0.1", "Address on which telemetry.port listens; by default only this host can connect.")


class Cluster(Section):
    coordinator: str | None = key(
        None, "HOST:PORT of process 0. Default: JAX_COORDINATOR_ADDRESS, or else the launcher's value."
    )
    processes: int | None = key(
        None, "Number of processes. Default: JAX_NUM_PROCESSES, or else the launcher's value, or else 1.", ge=1
    )
    process_id: int | None = key(
        None, "Index of this process, from 0. Default: JAX_PROCESS_ID, or else the launcher's value.", ge=0
    )
    launcher: Literal["auto", "explicit", "slurm", "kubernetes", "mpi", "torchrun"] = key(
        "auto", "Launcher whose environment variables identify this process; explicit: use only JAX's own variables."
    )
    local_devices: list[Annotated[int, Field(ge=0)]] | None = key(
        None, "GPUs of this process, as indices among those that it can see. Default: its share of them."
    )
    start_timeout_seconds: float = key(300.0, "How long to wait for all processes at the start.", gt=0)
    silence_timeout_seconds: float = key(
        30.0, "A process that has finished a step counts as lost once it has been silent for this long.", ge=5
    )
    heartbeat_timeout_seconds: int = key(
        100, "Time for which a process may be silent before JAX aborts the others. Until its first step, a process "
        "counts as lost after 90 % of this time.",
        ge=2,
    )  # fmt: skip

    nccl_timeout_seconds: int | None = key(
        None, "How long a collective may stall on GPUs before NCCL ends the process. Default: 300 s more than the "
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
    """The complete config. It checks the rules between keys that need no devices; `training.build.build_spec` checks
    the others."""

    seed: int = breaking_key(0, "Seed of initialisation, data order and dropout.", ge=0, lt=2**31)
    run: Run = Run()
    train: Train = Train()
    data: Data = Data()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lora: Lora | None = breaking_key(
        None, "Train adapters beside frozen weights (docs/lora.md). null: train the parameters themselves."
    )
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
        """Replaces empty sections (null in YAML) with their defaults."""
        if not isinstance(raw, dict):
            return raw
        not_sections = ("seed", "lora")
        return {name: ({} if value is None and name not in not_sections else value) for name, value in raw.items()}

    @model_validator(mode="after")
    def _check_and_complete(self) -> Self:
        if self.run.dir and "://" in self.run.dir:
            raise ValueError(
                f"run.dir: {self.run.dir} must be a folder of a file system, because jaxmnt appends to files in it; to "
                "store checkpoints at this address, set checkpoint.dir to it"
            )
        if self.checkpoint.dir and (trouble := path_problem(self.checkpoint.dir)):
            raise ValueError(f"checkpoint.dir: {self.checkpoint.dir} {trouble}")
        # The branch of a run with adapters may say where its base is now.
        if self.run.init_from and self.run.fork_from and self.lora is None:
            raise ValueError("run.init_from: run.fork_from is also set; remove one of them")
        if self.run.init_from_changes and not (self.run.init_from or self.run.fork_from):
            raise ValueError("run.init_from_changes: neither run.init_from nor run.fork_from is set; remove it")
        warmup, steps = self.optimizer.warmup_steps, self.train.steps
        if warmup >= steps:
            raise ValueError(
                f"optimizer.warmup_steps: {warmup} must be below train.steps ({steps}); lower it or raise train.steps"
            )
        longest_wait = self._longest_wait_seconds
        timeout = self.cluster.nccl_timeout_seconds
        if timeout is not None and timeout <= longest_wait:
            raise ValueError(
                f"cluster.nccl_timeout_seconds: {timeout} must be above the watchdog's longest limit ({longest_wait:g} "
                "s), or NCCL ends processes before the watchdog can name the process at fault; raise it, or leave it "
                "out"
            )
        if self.lora is not None and self.optimizer.frozen:
            raise ValueError(
                "optimizer.frozen: with lora, all parameters but the adapters are frozen; remove it, and name those "
                "that should train in lora.also_train"
            )
        check_data(self.data)
        check_pipeline(self.pipeline, self.mesh.pipeline, self.model.num_layers)
        return self.model_copy(update={"model": complete_model(self.model), "mesh": complete_mesh(self.mesh)})

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """Returns a copy of the config with new values for these dotted keys. The values are not checked
        here; contradictions are reported when a step is built from the config."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            section, _, field = name.partition(".")
            sections.setdefault(section, {})[field] = value
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )

    @property
    def eval_limit(self) -> int | None:
        """Number of held-out tokens per evaluation that `train.eval_tokens` sets, or None for all. Depends only on the
        config."""
        train = self.train
        if train.eval_tokens != "auto":
            return train.eval_tokens
        tokens_between_evaluations = train.eval_every * self.data.global_batch_size * self.data.sequence_length
        return -(-tokens_between_evaluations // 20) or None

    @property
    def run_dir(self) -> Path:
        """The run directory. Every config from `load_config` has one."""
        assert self.run.dir is not None
        return Path(self.run.dir)

    @property
    def nccl_timeout_seconds(self) -> float:
        """Seconds that a collective may stall before NCCL ends the process, always more than the watchdog allows."""
        return self.cluster.nccl_timeout_seconds or self._longest_wait_seconds + 300

    @property
    def _longest_wait_seconds(self) -> float:
        """Maximum seconds that the watchdog lets a process wait in a collective for others, which may be evaluating or
        saving."""
        watchdog = self.watchdog
        limits = (
            watchdog.step_seconds,
            watchdog.first_step_seconds,
            watchdog.evaluate_seconds,
            watchdog.save_seconds,
        )
        return max((limit for limit in limits if limit is not None), default=0.0)
