"""`python -m mglu_ops tune`: measures launches of the CUDA kernels offline, and writes the fastest ones to a table.

`backends.cuda.launch_tables` reads the tables. No code of `mglu_ops.tuning` runs when an operator is called.
"""
