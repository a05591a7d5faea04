"""Where clients run: in this process, in worker processes, on Flower's simulation."""
