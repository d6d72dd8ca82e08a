"""Operators in Triton for GPUs. Nothing here is imported before `kernels.ops.cuda` has found that
Triton is there; `ops.py` is the flavour, the other files are kernels.
"""
