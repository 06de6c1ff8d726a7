"""Other programs that serve the same prompts, each in an interpreter of its own."""
