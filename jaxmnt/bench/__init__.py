"""Measuring runs side by side."""
