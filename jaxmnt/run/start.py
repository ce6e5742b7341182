"""Where a run stands before it goes on, and how one begins that has no checkpoint of its own."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxmnt.checkpoint.commit import Committed
from jaxmnt.checkpoint.refs import find
from jaxmnt.config.describe import Change, changes
from jaxmnt.config.schema import Config
from jaxmnt.data.run_tokenizer import of_data
from jaxmnt.data.sources import Sources
from jaxmnt.errors import ConfigError
from jaxmnt.huggingface.fits import (
    SCHEME,
    folder_origin,
    refuse_other_arrays,
    refuse_what_does_not_fit,
    run_origin,
)
from jaxmnt.huggingface.folder import Folder
from jaxmnt.run.branch import branch_point, branch_remark
from jaxmnt.run.changes import different_data, numbering, refuse_skips, refuse_stop
from jaxmnt.run.learning_rate import rate_remarks


@dataclass(frozen=True)
class ResumePoint:
    """Where a run stands before it goes on."""

    run: str
    """The run's id."""
    lineage: list[dict[str, Any]] = field(default_factory=list)
    """The runs and steps that this one was forked from, newest first."""
    checkpoint: Committed | None = None
    """What to restore; None begins anew."""
    kind: str = "own"
    """Whose checkpoint it is: own, fork (another run's, all of it) or init (another run's, its parameters)."""
    changes: list[Change] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Lines for people: what was taken over or set aside."""
    damaged: list[str] = field(default_factory=list)
    """Of these, what tells of checkpoints that are not used."""
    fresh: bool = False
    """Whether --fresh was said: the same command would begin anew once more."""
    weights: Path | None = None
    """Instead of a checkpoint: the folder of Hugging Face whose weights to begin with."""

    @property
    def step(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.step

    @property
    def tokens(self) -> int:
        return 0 if self.checkpoint is None or self.kind == "init" else self.checkpoint.manifest.tokens


def begin(config: Config, data: Sources, run: str) -> ResumePoint:
    """Where a run stands that has no checkpoint of its own yet.

    Raises `ConfigError` if the config names another run or model that it cannot begin with.
    """
    source = config.run.fork_from or config.run.init_from
    if source is None:
        return ResumePoint(run)
    key = "run.fork_from" if config.run.fork_from else "run.init_from"
    tokenizer = lambda: of_data(data.tokenizer, data.vocab_size, data.folder)
    fits = lambda origin: refuse_what_does_not_fit(origin, config.model, tokenizer(), config.run.init_from_changes)
    if config.run.init_from and source.startswith(SCHEME):
        folder = Folder(Path(source.removeprefix(SCHEME)), key)
        remarks = fits(folder_origin(folder, key))
        return ResumePoint(run, kind="init", remarks=remarks, weights=folder.path)
    checkpoint = find(source, key)
    origin = run_origin(source, checkpoint, key)
    remarks = fits(origin)
    refuse_other_arrays(origin, checkpoint, config.model)
    if config.run.init_from:
        return ResumePoint(run, checkpoint=checkpoint, kind="init", remarks=remarks)
    if checkpoint.step >= config.train.steps:
        raise ConfigError(
            f"train.steps: {config.train.steps} leaves nothing to do after step {checkpoint.step} of {key}; raise it"
        )
    refuse_stop(config, checkpoint, key)
    manifest, earlier = checkpoint.manifest, checkpoint.config
    other_data = different_data(manifest.data, data.digests)
    if not other_data and numbering(earlier) == numbering(config):
        refuse_skips(config, checkpoint)
    point = branch_point(checkpoint, config)
    remark = branch_remark(checkpoint, config, point, other_data)
    parent = {"run": manifest.run, "path": str(checkpoint.path.absolute()), **point._asdict()}
    remarks += [*([] if remark is None else [remark]), *rate_remarks(checkpoint, config)]
    return ResumePoint(run, [parent, *manifest.lineage], checkpoint, "fork", changes(earlier, config), remarks)
