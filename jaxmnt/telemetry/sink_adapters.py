"""Sinks for programs that people look at runs with. Each takes up the same run again after a restart.

A run that goes on from a checkpoint takes some steps again, so steps are told as numbers of their own where a program
wants them to grow.
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
        # Without TensorBoard's own writer, which has one more thread and queue.
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}.{run.attempt}"
        self._file = (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._flushed = 0.0
        self._add(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        if run.step or run.attempt:
            # What an earlier attempt wrote of later steps does not count any more.
            began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(wall_time=now, step=run.step + 1, session_log=began))

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        told = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(self._event.Event(wall_time=time, step=step, summary=self._summary.Summary(value=told)))

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self._flushed = time.monotonic()
            self._records.flush()


class WeightsAndBiases:
    """A run with our run's id; WANDB_MODE, WANDB_ENTITY and the like count as everywhere."""

    def __init__(self, run: SinkRun):
        import wandb

        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.directory.name,
            config=run.config,
            dir=str(run.directory),
            resume="allow",
            # By default a button of its page interrupts the process, which would ask the run to stop.
            settings=wandb.Settings(silent=True, console="off", stop_fn=lambda: None),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run that has our run's id as its name; TRACKIO_DIR and the like count as everywhere."""

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
    """A run that is found again by its tag; MLFLOW_TRACKING_URI counts as everywhere."""

    _TAG = "jaxmnt.run"
    _MOST_PARAMETERS = 100
    """In one request."""

    def __init__(self, run: SinkRun):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        known = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if known is None else known.experiment_id
        found = self._client.search_runs([experiment], f"tags.`{self._TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(experiment, run_name=run.directory.name, tags={self._TAG: run.id})
        self._id = made.info.run_id
        parameters = [Param(key, str(value)[:500]) for key, value in flatten_tree(run.config).items()]
        for first in range(0, len(parameters), self._MOST_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + self._MOST_PARAMETERS])

    def write(self, step: int, time: float, values: dict[str, float]) -> None:
        told = [self._metric(name, value, round(1e3 * time), step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=told)

    def close(self) -> None:
        self._client.set_terminated(self._id)
