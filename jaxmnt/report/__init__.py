"""Reports on a run, computed from the JSON lines in its directory."""
