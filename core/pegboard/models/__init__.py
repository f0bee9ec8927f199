"""Architectures and the building blocks that they are made of."""
