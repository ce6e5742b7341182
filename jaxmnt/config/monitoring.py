"""Settings of what watches a run: limits of time, what is measured, and who is told of it."""

from typing import Literal

from jaxmnt.config.section import Section, key


class Watchdog(Section):
    step_seconds: float | None = key(
        45.0, "A step may take so long before the run counts as hanging; null turns that off.", gt=0
    )
    factor: float = key(10.0, "Or so many times the median step, whichever is longer.", ge=1)
    first_step_seconds: float | None = key(900.0, "The first step, which opens connections; null is no limit.", gt=0)
    compile_seconds: float | None = key(7200.0, "Compiling.", gt=0)
    restore_seconds: float | None = key(3600.0, "Restoring a checkpoint, and waiting for data at the start.", gt=0)
    evaluate_seconds: float | None = key(900.0, "A batch of an evaluation.", gt=0)
    save_seconds: float | None = key(
        3600.0, "The part of a save that blocks training, and the whole of the last save.", gt=0
    )


class Telemetry(Section):
    flops: Literal["causal", "square", "parameters", "levanter"] = key(
        "causal", "What MFU counts: weights that multiply and attention over the keys that a token sees, or over the "
                  "square of the length, or that and every parameter, or as Levanter.",
    )  # fmt: skip
    phases: bool = key(
        True, "Whether processes tell where their steps go (phases.jsonl), by which stragglers are found."
    )
    resources_every_seconds: float | None = key(
        30.0, "Seconds between two readings of memory, GPUs and network (resources.jsonl); null: none.", ge=0.1
    )
    probe_every: int = key(
        1000, "Steps between two products that each device computes by itself, to find a slow one; 0: never.", ge=0
    )
    noise_scale: bool = key(
        False, "Whether steps also measure the gradient noise scale, which says how large a batch is of use."
    )
    profile_at: int | None = key(
        None, "Step from which one step is profiled, after a checkpoint, on one device of process 0.", ge=1
    )
    samples: list[str] = key([], "Prompts that are continued after each evaluation, for the events and the report.")
    sample_tokens: int = key(64, "How many tokens each of them is continued by.", ge=1)
    sinks: list[str] | None = key(
        None, "Where metrics go besides: tensorboard, wandb, trackio, mlflow, dotted paths of classes of your own; "
              "default tensorboard if it is installed.",
    )  # fmt: skip
    project: str = key("jaxmnt", "Project or experiment in which wandb, trackio and mlflow keep the run.", min_length=1)
    port: int | None = key(
        None, "Port on which process 0 answers /metrics (Prometheus), /status, /healthz and /stacks; 0: any free one.",
        ge=0, le=65535,
    )  # fmt: skip
    host: str = key("127.0.0.1", "Address for telemetry.port; by default only this host can ask.")
