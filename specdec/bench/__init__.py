"""Load tests of a gateway, measured from the client's side. Free of torch."""
