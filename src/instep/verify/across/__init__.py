"""Two runs of different size against each other."""
