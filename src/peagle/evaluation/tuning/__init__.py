"""The choice of K by batch size, from the costs of decode steps here and from acceptance."""
