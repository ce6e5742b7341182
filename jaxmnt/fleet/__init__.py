"""Describes how runs on many devices fail, decides when they are started again, and simulates both."""
