"""Train a transformer over rows of a table whose embeddings stay on the host."""
