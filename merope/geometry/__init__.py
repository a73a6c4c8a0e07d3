"""Cameras, lenses, rays and the frames built on them. Torch only, stateless, any leading dimensions."""
