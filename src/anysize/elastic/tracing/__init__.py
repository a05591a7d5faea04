"""Which units of which tensors belong together: one forward pass on the meta device, followed by labels."""
