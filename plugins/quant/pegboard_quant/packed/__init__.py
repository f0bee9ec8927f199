"""Weights of 4 and 8 bits with a scale a group of columns: one record, readers of every format, and the linear."""
