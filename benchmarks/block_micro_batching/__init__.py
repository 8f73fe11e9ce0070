"""What a step on few samples in each block leaves on a GPU, beside micro-batches."""
