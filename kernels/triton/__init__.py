"""Triton sources of the Ops, shared by every chip that Triton compiles for.

A file holds the kernels of one idea. They import triton; `plans`, which says how each is launched, does not, and
nothing else of porter imports the kernels.
"""
