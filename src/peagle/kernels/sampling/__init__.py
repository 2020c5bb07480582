"""From logits to tokens: rules, probabilities, draws and the verification of drafts."""
