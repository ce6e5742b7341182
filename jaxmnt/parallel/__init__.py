"""The placement of arrays: the mesh of devices, and one table that maps logical axes to mesh axes."""
