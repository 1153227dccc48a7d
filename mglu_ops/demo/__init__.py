"""The whole life of a model with MGLU in one command: train, evaluate, freeze, generate, export, compare, time."""
