"""The procedural driving world: streets, textures, ray casting, clips."""
