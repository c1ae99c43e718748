"""Tensors in, tensors out: no optimizer, no process group, no configuration."""
