"""Telemetry of a run: events and metrics as JSON lines, progress on the terminal, and FLOP counts."""
