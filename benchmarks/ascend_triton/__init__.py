"""The shared Triton kernels through Ascend's own compiler, without a chip: its IR run on x86, and its memory plan."""
