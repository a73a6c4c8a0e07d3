"""From a prompt, a camera path and a few frames to a video."""
