"""The training loop and what surrounds it: the run directory, evaluation, and the request to stop."""
