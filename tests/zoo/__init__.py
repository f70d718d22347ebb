"""The zoo: architectures of other packages with random weights. Each is exported as a user would do it, in its own process."""
