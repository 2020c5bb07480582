"""The losslessness certificate: a proof that drafts leave the target's output as it is."""
