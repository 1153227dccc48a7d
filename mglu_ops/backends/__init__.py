"""Implementations of the operators. Each is a module of functions over plain tensors, with no autograd in it.

`reference` is the float64 oracle of the tests; `composite` is n_masks + 1 library GEMMs on any device.
"""
