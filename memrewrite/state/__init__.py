"""What a run may change, kept and put back."""
