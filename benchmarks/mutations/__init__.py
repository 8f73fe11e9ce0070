"""Whether a test fails for each wait that is missing."""
