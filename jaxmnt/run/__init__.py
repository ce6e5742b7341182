"""What surrounds the loop: the run directory, evaluation, and the wish to stop."""
