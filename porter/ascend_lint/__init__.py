"""What goes wrong in code that calls torch_npu, found before a chip does: arguments, masks, tables, stored tensors."""
