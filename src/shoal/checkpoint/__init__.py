"""Models on disk: finding them, and reading only what a rank needs."""
