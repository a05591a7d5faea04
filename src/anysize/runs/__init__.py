"""Runs: rounds, resuming, progress, and what a finished run can do."""
