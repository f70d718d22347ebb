"""The zoo: architectures of other packages with random weights. Each is exported in its own process, as a user would do it."""
