"""Clips to train on: real data sets, your own videos, the cache, sampling and loading."""
