"""Faults planted in exports for Ascend: each must be refused by the catalogue in words, or found by alignment."""
