"""The vendor's operators on the CPU, by their documented semantics."""
