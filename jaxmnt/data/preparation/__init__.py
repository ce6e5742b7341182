"""Preparing data: inputs → parts → documents → tokens → shards, in several processes, resumable."""

from jaxmnt.data.preparation.commit import Summary
from jaxmnt.data.preparation.document import Reading
from jaxmnt.data.preparation.inputs import Selection
from jaxmnt.data.preparation.run import build
from jaxmnt.data.preparation.settings import Settings

__all__ = ["Reading", "Selection", "Settings", "Summary", "build"]
