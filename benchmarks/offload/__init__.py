"""Which blocks real decodes keep from step to step, and what caches of blocks make of it."""
