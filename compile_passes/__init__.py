"""The fusion pass: finds MGLU layers in an FX graph, proves that each may be fused, rewrites them, and reports.

README.md in this folder says what the pass recognises, why that is sound, and which file does what.
"""
