"""Server processes that tests and benchmarks start."""
