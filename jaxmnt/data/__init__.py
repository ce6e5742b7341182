"""Turns text into batches: tokenized shards on disk, windows over them, and the rows of each step."""
