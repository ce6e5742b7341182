"""What a run reads: the vocabulary that data and model must share, and the feed of training batches."""

from jaxmnt.config.schema import Config
from jaxmnt.data.batches import training_rows
from jaxmnt.data.feed import Feed, process_rows
from jaxmnt.data.store import PreparedData
from jaxmnt.errors import ConfigError
from jaxmnt.program.compiled import Program


def fit_to_data(config: Config, data: PreparedData) -> Config:
    """The config with `model.vocab_size` filled in from the data if it was not set.

    A model may have more rows than the data has ids (the rest of the logits is masked), but not fewer:
    that raises `ConfigError`, and so does data that does not fill one row.
    """
    length = config.data.sequence_length
    if data.tokens("train") < length:
        raise ConfigError(
            f"data.sequence_length: {length} is more than the {data.tokens('train')} tokens of {data.path}; "
            "lower it or prepare more text"
        )
    size = config.model.vocab_size
    if size is None:
        rounded = -(-data.vocab_size // 64) * 64
        return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": rounded})})
    if data.vocab_size > size:
        raise ConfigError(
            f"model.vocab_size: {size} is smaller than the {data.vocab_size} token ids of {data.path}; "
            f"raise it to {data.vocab_size} or more, or leave it out"
        )
    return config


def training_feed(config: Config, data: PreparedData, program: Program, start_step: int) -> Feed:
    """The feed of this process's rows of every global batch from `start_step` on."""
    settings = config.data
    rows = process_rows(program.batch_sharding, settings.global_batch_size, settings.sequence_length)
    source = training_rows(
        data,
        seed=config.seed,
        rows=rows,
        global_rows=settings.global_batch_size,
        length=settings.sequence_length,
        document_mask=settings.document_mask,
        start_step=start_step,
        prefetch=settings.prefetch,
    )
    return Feed(source, rows, settings.global_batch_size, program.batch_sharding, digest=settings.log_digest)
