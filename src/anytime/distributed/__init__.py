"""Parameters that several processes hold or train together."""
