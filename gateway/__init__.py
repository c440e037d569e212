"""The gateway: sequences the rounds of draft and verifier behind one Generate call."""
