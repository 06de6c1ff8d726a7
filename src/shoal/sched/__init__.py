"""Which tokens of which requests go into the next step."""
