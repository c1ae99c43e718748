"""The optimizers: one base, one class each, and their oracle."""
