"""DriftBench: planted faults and legitimate differences that an aligner must tell apart, and name."""
