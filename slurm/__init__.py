"""The cluster: jobs, their states, and what runs first on a node. Knows nothing of relax."""
