"""Pictures of paths and numbers."""
