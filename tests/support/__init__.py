"""What tests share: tiny models, the rule of equality, fakes."""
