"""A back end of ``torch.compile`` that keeps a training step within a byte budget (see ``entry``)."""
