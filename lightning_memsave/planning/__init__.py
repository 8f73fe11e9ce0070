"""What memory will be, and why: steps on tensors without data, and what is made of them."""
