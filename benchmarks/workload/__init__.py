"""A random model of Llama-3.1-8B's shape whose attention is peaked and belongs to pages, and prompts for it."""
