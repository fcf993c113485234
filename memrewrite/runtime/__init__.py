"""What a rewritten model needs while it runs; torch only, because its text is part of every artifact."""
