"""What only torch's CUDA build can show, on the virtual GPU of `tests/virtual_gpu`."""
