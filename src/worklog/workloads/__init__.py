"""Models at exact public shapes with seeded random weights: nothing to download, the same bytes to move."""
