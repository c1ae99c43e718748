"""Triton twins of the update: the same functions of core/, executed in few launches. They import nothing of ours."""
