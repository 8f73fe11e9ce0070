"""Find the model and the batch that the user pointed at."""
