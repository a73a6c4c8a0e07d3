"""The demo and the model that it drives."""
