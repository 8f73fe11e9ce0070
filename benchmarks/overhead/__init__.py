"""What the callback costs in time."""
