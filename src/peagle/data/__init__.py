"""Training data: read, prepared, regenerated, inspected, packed; and stored features."""
