"""What a size costs. Nothing else computes a cost."""
