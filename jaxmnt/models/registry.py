"""The registered families of models, by their names in `model.family`."""

from inspect import isabstract

from jaxmnt.config.lora import Lora
from jaxmnt.config.model import EXPERT_SETTINGS, Model
from jaxmnt.config.own_code import import_dotted
from jaxmnt.errors import ConfigError, printable, suggest
from jaxmnt.models.contract import Definition, Family, define, with_adapters

FAMILIES = {
    "gemma2": "jaxmnt.models.gemma.Gemma2",
    "gemma3": "jaxmnt.models.gemma.Gemma3",
    "gpt2": "jaxmnt.models.gpt2.GPT2",
    "llama": "jaxmnt.models.llama.Llama",
    "mistral": "jaxmnt.models.llama.Mistral",
    "mixtral": "jaxmnt.models.mixtures.Mixtral",
    "olmo2": "jaxmnt.models.olmo.Olmo2",
    "olmo3": "jaxmnt.models.olmo.Olmo3",
    "olmoe": "jaxmnt.models.mixtures.Olmoe",
    "qwen2": "jaxmnt.models.llama.Qwen2",
    "qwen3": "jaxmnt.models.llama.Qwen3",
    "qwen3_moe": "jaxmnt.models.mixtures.Qwen3Moe",
}

OPTIONAL_SETTINGS = (
    "sliding_window",
    "sliding_window_pattern",
    "local_rope_theta",
    "max_positions",
    "attention_scale",
    "attention_soft_cap",
    "logit_soft_cap",
    *EXPERT_SETTINGS,
)
"""Settings of `model` that only some families have (`Family.settings`)."""


def build_family(config: Model, vocab_size: int) -> Family:
    """Returns the family that the config names, either by its registered name or by the dotted path of its class.

    Raises `ConfigError` for an unknown family, and for settings that the family does not support.
    """
    named_class = family_class(config.family)
    for name in OPTIONAL_SETTINGS:
        if getattr(config, name) is not None and name not in named_class.settings:
            raise ConfigError(f"model.{name}: family {config.family} does not support this setting; remove it")
    return named_class(config, vocab_size)


def define_model(config: Model, lora: Lora | None = None) -> Definition:
    """Returns the definition of the model of a config, with the adapters that `lora` requests.

    The vocabulary size in the config must be known. Raises `ConfigError` as `build_family` and `define` do, and for
    adapters that the model cannot have.
    """
    assert config.vocab_size is not None
    definition = define(build_family(config, config.vocab_size))
    return definition if lora is None else with_adapters(definition, lora)


def family_class(name: str) -> type[Family]:
    """Returns the class of a family. Raises `ConfigError` for an unknown family."""
    path = FAMILIES.get(name, name if "." in name else None)
    if path is None:
        raise ConfigError(
            f"model.family: {printable(name)} is not known; {suggest(name, sorted(FAMILIES))} (for a family of your "
            "own, give the dotted path of its class)"
        )
    imported = import_dotted(path, "model.family", "a class")
    if not (isinstance(imported, type) and issubclass(imported, Family)):
        raise ConfigError(f"model.family: {printable(name)} is not a subclass of jaxmnt.models.contract.Family")
    if isabstract(imported):
        raise ConfigError(f"model.family: {printable(name)} lacks the method layer; see docs/models.md")
    return imported
