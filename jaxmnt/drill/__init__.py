"""The drill: injects the failures of a long run into a small version of its config, before the run."""
