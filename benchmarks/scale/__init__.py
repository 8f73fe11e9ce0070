"""Peak memory and time of several processes."""
