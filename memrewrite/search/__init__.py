"""From a captured model to the rewritten one that is within its budget."""
