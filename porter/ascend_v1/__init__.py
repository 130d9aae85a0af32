"""AscendV1, the quantized checkpoint that vllm-ascend loads with `--quantization ascend`: written, and checked.

The sources of the format, and what of them was run, are in docs/ascend_v1.md.
"""
