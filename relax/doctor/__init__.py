"""`relax check`: what a configuration will do, where, and what it takes, before anything runs."""
