"""Goldens: recorded truth. What each module of a model received and returned, where, and with which weights."""
