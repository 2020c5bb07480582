"""Products with weights: of few rows, of packed weights, of the experts of a mixture."""
