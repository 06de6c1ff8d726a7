"""shoal: one Hugging Face model over many devices, as one."""
