"""What the 8-bit step costs when it waits once for the GPU, beside bitsandbytes' own."""
