"""The fusion pass: it recognises MGLU layers in a graph, proves that it may fuse them, rewrites them, and reports.

README.md in this folder says what it recognises, why that is sound, and which file does what.
"""
