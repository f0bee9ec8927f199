"""Triton kernels compiled before they are needed, many at a time: one after another they take seconds.

`ahead.Compilation` notes what launches would compile; `workers` compiles it in processes, each of which runs `worker`.
"""
