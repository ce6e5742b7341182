"""The typed config: its settings, how it is loaded, and how a change affects a resumed run."""

from jaxmnt.config.load import load_config
from jaxmnt.config.schema import Config

__all__ = ["Config", "load_config"]
