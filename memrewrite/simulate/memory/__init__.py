"""Who holds which bytes: storages, and the blocks of the caching allocator."""
