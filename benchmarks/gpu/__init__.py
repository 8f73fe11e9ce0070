"""What only a GPU can tell, most valuable first: `python -m benchmarks.gpu --list`."""
