"""The draft service: a small model, or something simpler, that proposes tokens to verify."""
