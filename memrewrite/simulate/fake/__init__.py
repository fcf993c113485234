"""Steps on tensors without data: their values where they matter, their true shapes and types."""
