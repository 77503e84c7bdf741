"""What several test suites and benchmarks share: small models, their inputs, and runs of the product."""
