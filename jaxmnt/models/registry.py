"""The families that there are, by the name that `model.family` has."""

from inspect import isabstract

from jaxmnt.config.model import Model
from jaxmnt.config.own_code import import_dotted
from jaxmnt.errors import ConfigError, nearest, printable
from jaxmnt.models.contract import Family

FAMILIES = {
    "gemma2": "jaxmnt.models.gemma.Gemma2",
    "gemma3": "jaxmnt.models.gemma.Gemma3",
    "gpt2": "jaxmnt.models.gpt2.GPT2",
    "llama": "jaxmnt.models.llama.Llama",
    "mistral": "jaxmnt.models.llama.Mistral",
    "olmo2": "jaxmnt.models.olmo.Olmo2",
    "olmo3": "jaxmnt.models.olmo.Olmo3",
    "qwen2": "jaxmnt.models.llama.Qwen2",
    "qwen3": "jaxmnt.models.llama.Qwen3",
}

OPTIONAL = (
    "sliding_window",
    "sliding_window_pattern",
    "local_rope_theta",
    "max_positions",
    "attention_scale",
    "attention_soft_cap",
    "logit_soft_cap",
)
"""Settings of `model` that only some families have (`Family.settings`)."""


def build_family(config: Model, vocab_size: int) -> Family:
    """The family that the config names, or whose class is at the dotted path that it names.

    Raises `ConfigError` for a family that is not known, and for settings that it does not have.
    """
    kind = family_class(config.family)
    for name in OPTIONAL:
        if getattr(config, name) is not None and name not in kind.settings:
            raise ConfigError(f"model.{name}: the family {config.family} has no such setting; leave it out")
    return kind(config, vocab_size)


def family_class(name: str) -> type[Family]:
    """Raises `ConfigError` for a family that is not known."""
    path = FAMILIES.get(name, name if "." in name else None)
    if path is None:
        raise ConfigError(
            f"model.family: {printable(name)} is not known; {nearest(name, sorted(FAMILIES))} (a family of your own is "
            "the dotted path of its class)"
        )
    found = import_dotted(path, "model.family", "a class")
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise ConfigError(f"model.family: {printable(name)} is not a subclass of jaxmnt.models.contract.Family")
    if isabstract(found):
        raise ConfigError(f"model.family: {printable(name)} lacks the method layer; docs/models.md says what it makes")
    return found
