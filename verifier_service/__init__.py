"""The verifier service: the target model, which decides what stands of a proposal."""
