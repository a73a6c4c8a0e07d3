"""From files to clips: pose formats, datasets, the procedural world, curation and loading."""
