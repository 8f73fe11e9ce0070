"""What every technique is made of."""
