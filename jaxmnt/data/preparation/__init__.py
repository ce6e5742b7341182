"""Preparing data: inputs → parts → documents → tokens → shards, in several processes, resumable."""

from jaxmnt.data.preparation.documents import Reading
from jaxmnt.data.preparation.inputs import Selection, Settings
from jaxmnt.data.preparation.plan import Summary
from jaxmnt.data.preparation.run import build

__all__ = ["Reading", "Selection", "Settings", "Summary", "build"]
