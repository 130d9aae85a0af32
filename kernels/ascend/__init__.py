"""Kernels of torch_npu for Huawei Ascend chips."""
