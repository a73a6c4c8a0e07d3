"""From cameras, a prompt and first frames to a video."""
