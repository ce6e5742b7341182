"""Where arrays live: the mesh of devices, and one table that maps logical axes to it."""
