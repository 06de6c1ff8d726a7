"""What is split how, derived by measuring the model's own data flow."""
