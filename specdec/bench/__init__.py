"""Load tests of a gateway, and drafts scored on what a target wrote. Free of torch."""
