"""Benchmarks that anyone can run: the procedural world as data set, oracle and ruler."""
