"""Preparing data: inputs → parts → documents → tokens → shards, in several processes, resumable."""

from jaxmnt.data.preparation.inputs import Selection
from jaxmnt.data.preparation.run import Settings, Summary, build

__all__ = ["Selection", "Settings", "Summary", "build"]
