"""A small network that chooses each request's draft width, from trials on a real engine."""
