"""Every family held to the same seven questions: `python -m benchmarks.families` prints docs/families.md."""
