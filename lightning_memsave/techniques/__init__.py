"""What saves memory: each technique is a file or a folder, usable in a plain PyTorch loop."""
