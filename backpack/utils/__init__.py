"""Tools that more than one part of the library (or a program on top of it) needs."""
