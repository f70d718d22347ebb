"""The zoo: architectures of other packages with random weights, exported as a user would, each in a process of its own."""
