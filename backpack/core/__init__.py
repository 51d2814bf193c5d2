"""The maths: derivatives of layers, and how quantities reduce them."""
