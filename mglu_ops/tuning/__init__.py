"""`python -m mglu_ops tune`: launches of the CUDA kernels, measured offline and kept in a table.

The tables are read by `backends.cuda.launch_tables`; nothing here runs when an operator is called.
"""
