"""Say why memory is what it is."""
