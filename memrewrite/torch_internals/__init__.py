"""Every private seam of PyTorch that memrewrite cannot do without, one file each, with its reason."""
