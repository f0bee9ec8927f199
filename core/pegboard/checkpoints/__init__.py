"""Readers of model files. Each follows `pegboard.contracts.checkpoint` and is found through the registry."""
