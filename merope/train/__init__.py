"""Training: a config file, a loop to be read from top to bottom, and checkpoints that any number of ranks reads."""
