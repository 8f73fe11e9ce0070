"""Find the model and the batch that the user named."""
