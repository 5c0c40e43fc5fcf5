"""Images as the vision models see them: bytes in, tiles of pixels out."""
