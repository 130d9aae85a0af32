"""Checks of an AscendV1 directory, whoever wrote it: what vllm-ascend would stumble over when it loads it."""
