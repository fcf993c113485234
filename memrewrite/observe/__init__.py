"""Facts about a captured graph, found by running it on fake tensors and never looked up."""
