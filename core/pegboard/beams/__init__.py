"""Beam search, on the host: the search itself, and the scheduler that runs its beams."""
