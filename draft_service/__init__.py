"""The draft service: a small model that proposes tokens for a target model to verify."""
