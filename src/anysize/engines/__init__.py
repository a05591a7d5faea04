"""Where clients run: an engine takes sub-models, and gives updates in the same order."""
