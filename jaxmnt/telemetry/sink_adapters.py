"""Sinks for experiment trackers. Each resumes the same run after a restart.

A run that resumes from a checkpoint repeats some steps. If a tracker requires steps to increase, the step is logged as
a separate metric.
"""

import os
import socket
import time
from typing import Any

from jaxmnt.config.load import flatten_tree
from jaxmnt.telemetry.sinks import SinkRun

_FLUSH_SECONDS = 2.0


class TensorBoard:
    """Event files in `RUN/tensorboard`, for `tensorboard --logdir RUN`."""

    def __init__(self, run: SinkRun):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2, summary_pb2
        folder = run.directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        now = time.time()
        # TensorBoard's own writer would add another thread and queue.
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}.{run.attempt}"
        self._file = (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._flushed = 0.0
        self._add(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        if run.step or run.attempt:
            # Tells TensorBoard to discard later steps that an earlier attempt has written.
            began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(wall_time=now, step=run.step + 1, session_log=began))

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        scalars = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(self._event.Event(wall_time=time, step=step, summary=self._summary.Summary(value=scalars)))

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._records.flush()


class WeightsAndBiases:
    """A Weights & Biases run with our run's id. Variables such as WANDB_MODE and WANDB_ENTITY apply as usual."""

    def __init__(self, run: SinkRun):
        import wandb

        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.directory.name,
            config=run.config,
            dir=str(run.directory),
            resume="allow",
            # By default, a button on the page of the run interrupts the process, which would ask the run to stop.
            settings=wandb.Settings(silent=True, console="off", stop_fn=lambda: None),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A Trackio run whose name is our run's id. Variables such as TRACKIO_DIR apply as usual."""

    def __init__(self, run: SinkRun):
        import trackio

        self._run = trackio.init(
            project=run.project, name=run.id, config=flatten_tree(run.config), resume="allow", embed=False
        )

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run, which is found again by its tag. MLFLOW_TRACKING_URI applies as usual."""

    _TAG = "jaxmnt.run"
    _MAX_PARAMETERS_PER_REQUEST = 100
    """Maximum number of parameters in one request."""

    def __init__(self, run: SinkRun):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        existing = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if existing is None else existing.experiment_id

        existing_runs = self._client.search_runs([experiment], f"tags.`{self._TAG}` = '{run.id}'", max_results=1)
        if existing_runs:
            self._id = existing_runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return

        new_run = self._client.create_run(experiment, run_name=run.directory.name, tags={self._TAG: run.id})
        self._id = new_run.info.run_id
        parameters = [Param(key, str(value)[:500]) for key, value in flatten_tree(run.config).items()]
        for first in range(0, len(parameters), self._MAX_PARAMETERS_PER_REQUEST):
            self._client.log_batch(self._id, params=parameters[first : first + self._MAX_PARAMETERS_PER_REQUEST])

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        metrics = [self._metric(name, value, round(1e3 * time), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)
