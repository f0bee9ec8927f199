"""The fused sampler: Triton kernels that never sort a vocabulary. `sampler.FusedSampler` is the part.

Logits are read in chunks of 32 groups of 128 (`chunks`); what is left of a row after that is small enough for one
program (`choosing` with `best`; `wide` with `bounding`, `gathering`, `picking` and `selecting`). `listing` gives
log-probabilities.
"""
