"""Grids of runs, searches for settings, and the tables and figures of the paper."""
