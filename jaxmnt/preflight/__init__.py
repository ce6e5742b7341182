"""Checks whether hosts, and the network between them, meet the needs of a run."""
