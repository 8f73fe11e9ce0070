"""Train models that do not fit: memory-saving callbacks for PyTorch Lightning."""
