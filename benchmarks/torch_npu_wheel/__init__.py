"""What porter says of torch_npu against the vendor's own wheel, in an environment that has it and no chip."""
