"""Runs and their directories: rounds, checkpoints, events, and what a finished run can do."""
