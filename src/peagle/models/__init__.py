"""The target model, the drafter, their checkpoints, and the elements a drafter trains on."""
