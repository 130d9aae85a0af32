"""Numeric contracts that a candidate keeps less well than the golden, found without running anything."""
