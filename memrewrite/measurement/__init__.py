"""What a step really takes, on the device itself."""
