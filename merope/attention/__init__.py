"""Attention over a plan: the definition, and the fast paths that are proven against it."""
