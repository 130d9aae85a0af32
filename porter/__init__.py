"""porter."""
