"""Checkpoints: saved in the background through Orbax, committed by a manifest of ours, restored on any mesh."""
