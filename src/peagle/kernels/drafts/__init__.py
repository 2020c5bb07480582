"""The batches of a decode step, the choice of drafts, and what the device keeps of a sequence."""
