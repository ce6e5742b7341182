"""Conversations in a model's own markup: chat templates, and the tokens of a conversation that are targets."""
