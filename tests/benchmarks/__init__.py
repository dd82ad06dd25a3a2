"""Benchmarks: each measures, asserts nothing about time, and ends with one line of JSON."""
