"""The typed config tree: what can be set, how it is loaded, and what a change means for a resumed run."""

from jaxmnt.config.load import load_config
from jaxmnt.config.schema import Config

__all__ = ["Config", "load_config"]
