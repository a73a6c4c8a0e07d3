"""How well a generated video followed its camera command, and how it looks."""
