"""What a decode step costs here, joined with acceptance: K by batch size."""
