"""What surrounds the loop: the run directory, evaluation, and the request to stop."""
