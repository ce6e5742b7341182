"""Identifies this process, connects the processes of a run, and lets them agree."""
