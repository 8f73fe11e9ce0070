"""Whether training learns as well with each technique as without."""
