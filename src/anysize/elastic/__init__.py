"""The mathematics of shrinking networks; it knows nothing of clients and servers."""
