"""Compares a model family, a loss and an optimizer on meshes of devices with one device."""
