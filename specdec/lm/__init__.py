"""The model runtime that the draft and verifier services share. The only part that needs torch."""
