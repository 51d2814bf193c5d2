"""Where samples are in a tensor, and where an operation moves them to."""
