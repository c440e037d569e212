"""Speculative decoding as gRPC microservices."""
