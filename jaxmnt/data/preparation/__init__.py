"""Prepares data: inputs → parts → documents → tokens → shards, in several processes, resumable."""
