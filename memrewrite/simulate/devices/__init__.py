"""What CUDA does otherwise, where there is none."""
