"""What memory is: counting, reading and reporting it."""
